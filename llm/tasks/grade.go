package tasks

import (
	"math"
	"regexp"
	"strings"
	"unicode/utf8"
)

// gradeChoices returns a function that grades an item with choices. The model's answer is the choice with the
// largest log-likelihood, which acc_norm divides by the number of characters of the choice and acc_bytes by
// the number of bytes.
func gradeChoices(e example, metrics []Metric) func([]Response) verdict {
	return func(responses []Response) verdict {
		options := e.options()
		chosen := map[string]int{
			"acc": largest(options, responses, func(string) float64 { return 1 }),
			"acc_norm": largest(options, responses, func(choice string) float64 {
				return float64(utf8.RuneCountInString(choice))
			}),
			"acc_bytes": largest(options, responses, func(choice string) float64 {
				return float64(len(choice))
			}),
		}

		v := verdict{prediction: chosen["acc"]}
		for _, m := range metrics {
			v.values = append(v.values, value{x: truth(chosen[m.Name] == e.gold)})
		}
		return v
	}
}

// largest returns the first choice with the largest log-likelihood divided by its length. As in NumPy's
// argmax, a quotient that is not a number counts as the largest.
func largest(choices []string, responses []Response, length func(choice string) float64) int {
	best, most := 0, math.Inf(-1)
	for i, c := range choices {
		x := responses[i].LogProb / length(c)
		if math.IsNaN(x) {
			return i
		}
		if x > most {
			best, most = i, x
		}
	}
	return best
}

// truth returns 1 for true and 0 for false.
func truth(x bool) float64 {
	if x {
		return 1
	}
	return 0
}

// gradeWord grades an item with a single continuation, by its log-likelihood and by whether the model would
// write it.
func gradeWord(responses []Response) verdict {
	r := responses[0]
	return verdict{prediction: r.Greedy, values: []value{{x: r.LogProb}, {x: truth(r.Greedy)}}}
}

// gradeText returns a function that grades running text by its words and bytes.
func gradeText(e example) func([]Response) verdict {
	return func(responses []Response) verdict {
		x := responses[0].LogProb
		words, bytes := float64(countWords(e.source)), float64(len(e.source))
		return verdict{values: []value{{x, words}, {x, bytes}, {x, bytes}}}
	}
}

var (
	// strictAnswer and flexibleAnswer find the answer in a solution: the number after the marks at the end of
	// GSM8K's solutions, or the last number anywhere.
	strictAnswer   = regexp.MustCompile(`#### (\-?[0-9\.\,]+)`)
	flexibleAnswer = regexp.MustCompile(`(-?[$0-9.,]{2,})|(-?[0-9]+)`)

	// before matches everything before the answer, and finalDot a dot at the end.
	before   = regexp.MustCompile(`(?s).*#### `)
	finalDot = regexp.MustCompile(`\.(\n?)\z`)
)

// invalidAnswer replaces the answer if a text has none.
const invalidAnswer = "[invalid]"

// gradeNumbers returns a function that grades a written solution by its final number.
func gradeNumbers(e example) func([]Response) verdict {
	return func(responses []Response) verdict {
		text := responses[0].Text
		strict, flexible := invalidAnswer, invalidAnswer
		if m := strictAnswer.FindStringSubmatch(text); m != nil {
			strict = strip(m[1])
		}
		if all := flexibleAnswer.FindAllString(text, -1); all != nil {
			flexible = strip(all[len(all)-1])
		}

		want := bareAnswer(e.target)
		return verdict{prediction: flexible, values: []value{{x: truth(bareAnswer(strict) == want)},
			{x: truth(bareAnswer(flexible) == want)}}}
	}
}

// bareAnswer removes everything but the answer itself, for comparisons.
func bareAnswer(text string) string {
	text = strings.NewReplacer(",", "", "$", "").Replace(text)
	text = finalDot.ReplaceAllString(before.ReplaceAllString(text, ""), "$1")
	return strings.ToLower(text)
}
