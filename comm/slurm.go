package comm

import (
	"fmt"
	"strconv"
	"strings"
)

// slurmPort returns the first port for a job step. Jobs that share a host get different ports, from
// 1,024 windows that start at 15000 and end below the ports that systems assign by themselves.
func slurmPort(job, step int) int { return 15000 + (job+step)%1024*PortWindow }

// maxSlurmHosts is the maximum number of hosts that a list may expand to.
const maxSlurmHosts = 1 << 17

// maxSlurmDigits is the maximum length of a number, which leading zeros could otherwise inflate.
const maxSlurmDigits = 20

// slurmHosts expands Slurm's list of nodes. For example, "gpu[01-03,7],login,r[1-2]n[0-1]" becomes
// gpu01, gpu02, gpu03, gpu7, login, r1n0, r1n1, r2n0, r2n1.
func slurmHosts(list string) ([]string, error) {
	items, err := splitOutsideBrackets(list)
	if err != nil {
		return nil, err
	}

	var hosts []string
	for _, item := range items {
		expanded, err := expandBrackets(item)
		if err != nil {
			return nil, fmt.Errorf("%q: %w", list, err)
		}
		if hosts = append(hosts, expanded...); len(hosts) > maxSlurmHosts {
			return nil, fmt.Errorf("%q names more than %d hosts", list, maxSlurmHosts)
		}
	}

	return hosts, nil
}

// splitOutsideBrackets splits a list at the commas between hosts.
func splitOutsideBrackets(list string) ([]string, error) {
	var items []string
	depth, start := 0, 0
	for i, r := range list + "," {
		switch r {
		case '[':
			depth++
		case ']':
			depth--
		case ',':
			if depth == 0 {
				items = append(items, list[start:i])
				start = i + 1
			}
		}
		if depth < 0 || depth > 1 {
			return nil, fmt.Errorf("%q: brackets do not match", list)
		}
	}

	if depth != 0 {
		return nil, fmt.Errorf("%q: brackets do not match", list)
	}

	return items, nil
}

// expandBrackets expands the first pair of brackets and, recursively, the rest.
func expandBrackets(item string) ([]string, error) {
	before, rest, found := strings.Cut(item, "[")
	if !found {
		if item == "" {
			return nil, fmt.Errorf("a host without a name")
		}
		return []string{item}, nil
	}

	ranges, after, _ := strings.Cut(rest, "]")
	tails := []string{""}
	if after != "" {
		var err error
		if tails, err = expandBrackets(after); err != nil {
			return nil, err
		}
	}

	var hosts []string
	for r := range strings.SplitSeq(ranges, ",") {
		numbers, err := expandRange(r)
		if err != nil {
			return nil, err
		}
		if len(hosts)+len(numbers)*len(tails) > maxSlurmHosts {
			return nil, fmt.Errorf("more than %d hosts", maxSlurmHosts)
		}
		for _, n := range numbers {
			for _, tail := range tails {
				hosts = append(hosts, before+n+tail)
			}
		}
	}

	return hosts, nil
}

// expandRange returns the numbers of "7" or "08-11", with the leading zeros of the first number.
func expandRange(r string) ([]string, error) {
	low, high, found := strings.Cut(r, "-")
	if !found {
		high = low
	}

	a, errA := strconv.ParseUint(low, 10, 32)
	b, errB := strconv.ParseUint(high, 10, 32)
	if errA != nil || errB != nil || b < a || len(low) > maxSlurmDigits {
		return nil, fmt.Errorf("[%s]: want a number or a range of them", r)
	}

	if b-a >= maxSlurmHosts {
		return nil, fmt.Errorf("[%s]: more than %d hosts", r, maxSlurmHosts)
	}

	var numbers []string
	for n := a; n <= b; n++ {
		numbers = append(numbers, fmt.Sprintf("%0*d", len(low), n))
	}

	return numbers, nil
}

// slurmCounts expands a list of tasks per node: "4(x2),3" becomes 4, 4, 3.
func slurmCounts(text string) ([]int, error) {
	var counts []int
	for item := range strings.SplitSeq(text, ",") {
		count, rest, repeated := strings.Cut(item, "(x")
		n, err := strconv.Atoi(count)
		times := 1
		if repeated && err == nil {
			times, err = strconv.Atoi(strings.TrimSuffix(rest, ")"))
		}
		if err != nil || n < 0 || times < 1 || len(counts)+times > maxSlurmHosts {
			return nil, fmt.Errorf("%q: want a number of tasks, or one as in 4(x2)", item)
		}
		for range times {
			counts = append(counts, n)
		}
	}

	return counts, nil
}
