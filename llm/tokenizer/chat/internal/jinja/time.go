package jinja

import (
	"fmt"
	"strings"
	"time"
)

// layouts are the directives of strftime in the C locale, in Go's notation.
var layouts = map[byte]string{'a': "Mon", 'A': "Monday", 'b': "Jan", 'B': "January", 'h': "Jan",
	'd': "02", 'e': "_2", 'm': "01", 'y': "06", 'H': "15", 'I': "03", 'M': "04", 'S': "05", 'p': "PM",
	'j': "002", 'D': "01/02/06", 'x': "01/02/06", 'F': "2006-01-02", 'R': "15:04", 'T': "15:04:05",
	'X': "15:04:05", 'r': "03:04:05 PM", 'c': "Mon Jan _2 15:04:05 2006", 'f': "000000"}

// strftime formats a time without a time zone as Python does on Linux.
func strftime(now time.Time, format string) string {
	var out strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' {
			out.WriteByte(format[i])
			continue
		}
		i++
		unpadded := i < len(format) && format[i] == '-'
		if unpadded {
			i++
		}
		if i == len(format) {
			fail("strftime_now: %q ends with an incomplete directive", format)
		}

		directive := format[i]
		text := ""
		switch directive {
		case '%':
			text = "%"
		case 'n':
			text = "\n"
		case 't':
			text = "\t"
		case 'Y':
			text = fmt.Sprint(now.Year())
		case 'P':
			text = strings.ToLower(now.Format("PM"))
		case 'u':
			text = fmt.Sprint((int(now.Weekday())+6)%7 + 1)
		case 'w':
			text = fmt.Sprint(int(now.Weekday()))
		case 'f':
			text = fmt.Sprintf("%06d", now.Nanosecond()/1000)
		case 'Z', 'z':
		default:
			layout, ok := layouts[directive]
			if !ok {
				fail("strftime_now: %%%c of %q is not supported", directive, format)
			}
			text = now.Format(layout)
		}

		if unpadded {
			if strings.IndexByte("dmyHIMSje", directive) < 0 {
				fail("strftime_now: %%-%c of %q is not supported", directive, format)
			}
			text = strings.TrimLeft(text, "0 ")
			if text == "" {
				text = "0"
			}
		}
		out.WriteString(text)
	}

	return out.String()
}
