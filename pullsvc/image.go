package pullsvc

import (
	"context"
	"errors"
)

// image is to build the image of the chain's scope.
func (c *chain) image(context.Context) error { return errors.ErrUnsupported }
