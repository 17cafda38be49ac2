package segment

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"slices"
)

// siv encrypts with a synthetic IV: the same text gives the same bytes every time, which
// tell nothing but their length to whoever lacks the key.
type siv struct {
	mac    []byte
	cipher cipher.Block
}

// derive makes the key of one use of a key.
func derive(key []byte, use string) ([]byte, error) {
	k, err := hkdf.Key(sha256.New, key, nil, use, sha256.Size)
	if err != nil {
		return nil, fmt.Errorf("segment: deriving a key: %w", err)
	}
	return k, nil
}

// newSIV makes a siv of one use of a key.
func newSIV(key []byte, use string) (siv, error) {
	hashing, err := derive(key, use)
	if err != nil {
		return siv{}, err
	}
	hiding, err := derive(key, use+" cipher")
	if err != nil {
		return siv{}, err
	}
	block, err := aes.NewCipher(hiding)
	if err != nil {
		return siv{}, fmt.Errorf("segment: deriving a key: %w", err)
	}
	return siv{mac: hashing, cipher: block}, nil
}

// iv hashes a text behind what it belongs to, if anything: of a use, that has one length.
func (s *siv) iv(plain []byte, of string) []byte {
	return mac(s.mac, slices.Concat([]byte(of), plain))[:aes.BlockSize]
}

// seal encrypts a text. Whoever opens it has to name what it belongs to.
func (s *siv) seal(plain []byte, of string) []byte {
	iv := s.iv(plain, of)
	sealed := make([]byte, aes.BlockSize+len(plain))
	copy(sealed, iv)
	cipher.NewCTR(s.cipher, iv).XORKeyStream(sealed[aes.BlockSize:], plain)
	return sealed
}

// open returns the text of what seal made, false for anything else.
func (s *siv) open(sealed []byte, of string) ([]byte, bool) {
	if len(sealed) < aes.BlockSize {
		return nil, false
	}
	iv, plain := sealed[:aes.BlockSize], bytes.Clone(sealed[aes.BlockSize:])
	cipher.NewCTR(s.cipher, iv).XORKeyStream(plain, plain)
	return plain, subtle.ConstantTimeCompare(s.iv(plain, of), iv) == 1
}
