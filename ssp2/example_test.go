package ssp2_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"github.com/syncpg/syncpg/ssp2"
)

// A request is read frame by frame, under limits.
func ExampleReader() {
	body, err := ssp2.AppendMessage(nil, &ssp2.Message{
		WireVersion: ssp2.WireV2,
		Kind:        ssp2.KindRequest,
		Frames: []ssp2.Frame{
			&ssp2.RequestHeader{ClientID: "phone-1", SchemaVersion: 3},
			&ssp2.PullHeader{Accept: ssp2.AcceptInlineRows | ssp2.AcceptExternalRows},
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}

	r := ssp2.NewReader(bytes.NewReader(body), ssp2.Limits{MaxMessageBytes: 1 << 20})
	for {
		frame, err := r.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			fmt.Println(ssp2.CodeOf(err), err)
			return
		}
		fmt.Println(frame.FrameType())
	}
	// Output:
	// REQ_HEADER
	// PULL_HEADER
}

// A COMMIT frame is written from what the log holds, without maps in between.
func ExampleBeginCommitFrame() {
	buf := ssp2.AppendEnvelope(nil, ssp2.WireV1, ssp2.KindResponse)
	buf, frame := ssp2.BeginCommitFrame(buf, 42, 1_700_000_000_000, "ada", []string{"notes"})
	buf = frame.AppendChange(buf, 0, "n-1", ssp2.OpDelete, 0, []string{"project=p1"}, nil)
	buf, err := frame.End(buf)
	fmt.Println(len(buf), err)
	// Output: 86 <nil>
}

// A row is decoded by the columns of its schema; values alias the input.
func ExampleDecodeRow() {
	cols := []ssp2.Column{
		{Name: "id", Type: ssp2.TypeString},
		{Name: "done", Type: ssp2.TypeBoolean, Nullable: true},
	}
	row, err := ssp2.AppendRow(nil, cols, []ssp2.Value{{Bytes: []byte("n-1")}, {Null: true}})
	if err != nil {
		fmt.Println(err)
		return
	}
	vals, err := ssp2.DecodeRow(cols, row, nil)
	fmt.Println(string(vals[0].Bytes), vals[1].Null, err)
	// Output: n-1 true <nil>
}

// The rendering shows a message as JSON.
func ExampleRender() {
	message, err := ssp2.AppendMessage(nil, &ssp2.Message{
		WireVersion: ssp2.WireV3,
		Kind:        ssp2.KindResponse,
		Frames:      []ssp2.Frame{&ssp2.ResponseHeader{LogEpoch: "e-1", ResetRequired: true}},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	rendering, err := ssp2.Render(message)
	fmt.Println(string(rendering), err)
	// Output: {"magic":"SSP2","wireVersion":3,"msgKind":"response","frames":[{"type":"RESP_HEADER","logEpoch":"e-1","resetRequired":true}]} <nil>
}
