package sharedlib

import (
	"iter"
	"reflect"
)

// Functions returns an iterator over the fields of a struct of functions: the name of the symbol,
// which is in the tag c, and a pointer to the field.
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
