package cudaops

import (
	"flag"
	"strings"
	"testing"
)

func TestPrecisionText(t *testing.T) {
	for want, p := range map[string]Precision{"f32": Float32, "bf16": BFloat16, "f16": Float16, "f8": Float8} {
		text, err := p.MarshalText()
		if string(text) != want || p.String() != want || err != nil {
			t.Errorf("%d is %q and %v, %v, want %q", uint8(p), text, p, err, want)
		}
		var parsed Precision
		flags := flag.NewFlagSet("", flag.ContinueOnError)
		flags.TextVar(&parsed, "precision", Float32, "")
		if err := flags.Parse([]string{"-precision", want}); err != nil || parsed != p {
			t.Errorf("-precision %s is %v, %v", want, parsed, err)
		}
	}
	p := BFloat16
	if err := p.UnmarshalText([]byte("fp8")); err == nil || !strings.Contains(err.Error(), `"fp8"`) || p != BFloat16 {
		t.Errorf("%v, %v", p, err)
	}
	if _, err := Precision(9).MarshalText(); err == nil || Precision(9).String() != "Precision(9)" {
		t.Errorf("%v, %v", Precision(9), err)
	}
}
