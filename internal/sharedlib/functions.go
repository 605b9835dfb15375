package sharedlib

import (
	"iter"
	"reflect"
)

// Functions yields pointers to the fields of a structure of functions, by the names of the symbols
// that their tags c have.
func Functions(api any) iter.Seq2[string, any] {
	v := reflect.ValueOf(api).Elem()
	return func(yield func(string, any) bool) {
		for i := range v.NumField() {
			if !yield(v.Type().Field(i).Tag.Get("c"), v.Field(i).Addr().Interface()) {
				return
			}
		}
	}
}
