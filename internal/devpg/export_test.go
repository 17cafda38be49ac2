package devpg

// InstallAdvice is the advice for a platform.
var InstallAdvice = installAdvice
