package grammar

// Parts of formats.
const (
	monthAndDay = `((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|` +
		`02-(0[1-9]|1[0-9]|2[0-8]))`
	date  = `[0-9]{4}-` + monthAndDay
	clock = `([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[-+]([01][0-9]|2[0-3]):[0-5][0-9])`
	byte8 = `(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])`
	label = `[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?`
	host  = label + `(\.` + label + `){0,4}`
	hex16 = `[0-9a-f]{1,4}`
)

// formats are regular expressions for the formats of strings. They need not match every text of the format.
var formats = map[string]string{
	"date":      `^` + date + `$`,
	"time":      `^` + clock + `$`,
	"date-time": `^` + date + `T` + clock + `$`,
	"duration":  `^P([1-9][0-9]{0,3}W|[1-9][0-9]{0,3}D(T[1-9][0-9]?H)?|T[1-9][0-9]{0,3}[HMS])$`,
	"email":     `^[a-z0-9]{1,15}([-._+][a-z0-9]{1,15}){0,2}@` + label + `(\.` + label + `){1,3}$`,
	"hostname":  `^` + host + `$`,
	"ipv4":      `^` + byte8 + `(\.` + byte8 + `){3}$`,
	"ipv6":      `^` + hex16 + `(:` + hex16 + `){7}$`,
	"uuid":      `^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`,
}
