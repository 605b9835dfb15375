package cudaops

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
)

// kasminaWay is a family of kernels and how many of its blocks a multiprocessor has in flight, 0 for all that fit.
type kasminaWay struct {
	family kernels.KasminaFamily
	blocks int
}

func (w kasminaWay) String() string {
	return kernels.Way{Family: w.family.String(), Size: w.blocks}.String()
}

// kasminaWays are those of a pass that the families can run. Fewer blocks leave fewer figures to merge.
func kasminaWays(families []kernels.KasminaFamily) (ways []kasminaWay) {
	for _, f := range families {
		if f == kernels.KasminaPlain {
			continue
		}
		ways = append(ways, kasminaWay{f, 0})
		if f != kernels.KasminaTile {
			ways = append(ways, kasminaWay{f, 2}, kasminaWay{f, 1})
		}
	}
	return append(ways, kasminaWay{kernels.KasminaPlain, 0})
}

// kasminaJob is what both passes have in common: the layer's arrays but X. Every seed blends and learns, and the kinds take
// turns.
func (k tunedKernels) kasminaJob(op string, l kernels.KasminaLayer, ways []kasminaWay, units ...string) (job, error) {
	j := job{op: op, shape: fmt.Sprintf("%dx%d, %d seeds, %d slots, %v, stability %d", l.Rows, l.State.Seeds*l.Chunk,
		l.State.Seeds, l.State.Slots, l.Type, l.Stability), build: k.Build(units...), ways: names(ways), plain: len(ways) - 1}
	data := driver.Bytes(make([]uint32, l.State.Bytes()/4))
	err := l.State.Encode(data, func(i int) kernels.KasminaSeed {
		s := kernels.KasminaSeed{Kind: uint8(i % 4), Blend: true, Learn: true, Alpha: 0.5, Low: -6, High: 6, Limit: 1}
		if l.State.Slots > 1 {
			s.Slot = uint16(1 + i%(l.State.Slots-1))
		}
		return s
	})
	j.arguments = []argument{{role: given, bytes: len(data), data: data}, numbers(reads, l.State.Slots*l.Chunk, driver.Float32),
		numbers(reads, l.State.Slots, driver.Float32)}
	return j, err
}

// kasminaGain is what another way than the rule's must save in a large layer. Alone, plain and ring with fewer blocks come so near to
// ring that which of them is chosen differs from run to run; in profiles of training steps they took 2 to 3 % more than ring did in others.
const kasminaGain = 0.1

// size says what a job's size means to how it is timed.
func (k tunedKernels) size(j *job) {
	if j.warm = k.isSmall(j.arguments); !j.warm {
		j.gain = kasminaGain
	}
}

// kasminaArguments is how many kasminaJob has.
const kasminaArguments = 3

// kasminaOn is the layer on a job's memory, computed in some way.
func (k tunedKernels) kasminaOn(l kernels.KasminaLayer, w kasminaWay, x driver.Ptr, memory []driver.Ptr) kernels.KasminaLayer {
	l = k.kasminaIn(l, w)
	l.X, l.State.Ptr, l.Weights, l.Scales = x, memory[0], memory[1], memory[2]
	return l
}

// kasminaIn is the layer computed in some way.
func (k tunedKernels) kasminaIn(l kernels.KasminaLayer, w kasminaWay) kernels.KasminaLayer {
	l.Family, l.Blocks = w.family, w.blocks*k.t.m.device.info.SMs
	return l
}

func (k tunedKernels) KasminaForward(s driver.Stream, f kernels.KasminaForward) error {
	families := k.KasminaFamilies(f.KasminaLayer, false, f.Telemetry, f.Y)
	n := f.Rows * f.State.Seeds * f.Chunk
	if len(families) < 2 || n == 0 {
		return k.kernelSet.KasminaForward(s, f)
	}
	ways := kasminaWays(families)
	j, err := k.kasminaJob("KasminaForward", f.KasminaLayer, ways, "kasmina", "kasmina_rows")
	if err != nil {
		return err
	}
	j.shape += plural(f.Telemetry, fmt.Sprintf("figures %d", f.Reduction)) + plural(f.Histogram != 0, "histogram")
	words := func(r role, n int) argument { return numbers(r, n, driver.Float32) }
	j.arguments = append(j.arguments, numbers(reads, n, f.Type), numbers(writes, n, f.Type),
		argument{role: zeroed, bytes: 4 * f.State.Seeds},
		argument{role: scratch, bytes: k.KasminaForwardWorkspace(f.KasminaLayer)},
		argument{role: scratch, bytes: 4 * kernels.KasminaBins * f.State.Seeds})
	if f.Telemetry {
		j.arguments = append(j.arguments, words(writes, kernels.KasminaForwardFigures*f.State.Seeds))
	}
	k.size(&j)
	j.run = func(way int, memory []driver.Ptr) error {
		g, m := f, memory[kasminaArguments:]
		g.Leave = nil // a way's result counts as a whole
		g.KasminaLayer = k.kasminaOn(f.KasminaLayer, ways[way], m[0], memory)
		g.Y, g.Bad, g.Workspace = m[1], m[2], m[3]
		if f.Histogram != 0 {
			g.Histogram = m[4]
		}
		if f.Telemetry {
			g.Figures = m[5]
		}
		return k.kernelSet.KasminaForward(s, g)
	}
	way, err := k.t.choose(j)
	if err != nil {
		return err
	}
	f.KasminaLayer = k.kasminaIn(f.KasminaLayer, ways[way])
	return k.kernelSet.KasminaForward(s, f)
}

// KasminaBackward times a pass in place with a DX of its own, since the next way needs G as it was.
func (k tunedKernels) KasminaBackward(s driver.Stream, b kernels.KasminaBackward) error {
	families := k.KasminaFamilies(b.KasminaLayer, true, b.Telemetry, b.DX, b.G)
	n := b.Rows * b.State.Seeds * b.Chunk
	if len(families) < 2 || n == 0 {
		return k.kernelSet.KasminaBackward(s, b)
	}
	ways := kasminaWays(families)
	j, err := k.kasminaJob("KasminaBackward", b.KasminaLayer, ways, "kasmina_backward", "kasmina_rows")
	if err != nil {
		return err
	}
	j.shape += plural(b.Telemetry, fmt.Sprintf("figures %d", b.Reduction)) + plural(b.Clip, "clipped")
	seeds, slots := b.State.Seeds, b.State.Slots
	j.arguments = append(j.arguments, numbers(reads, n, b.Type), numbers(reads, n, b.Type), numbers(writes, n, b.Type),
		numbers(writes, slots*b.Chunk, driver.Float32), numbers(writes, slots, driver.Float32), argument{role: zeroed, bytes: 8 * seeds},
		argument{role: scratch, bytes: k.KasminaBackwardWorkspace(b.KasminaLayer, b.Clip)})
	if b.Telemetry {
		j.arguments = append(j.arguments, numbers(writes, kernels.KasminaBackwardFigures*seeds, driver.Float32))
	}
	k.size(&j)
	j.run = func(way int, memory []driver.Ptr) error {
		g, m := b, memory[kasminaArguments:]
		g.Leave = nil
		g.KasminaLayer = k.kasminaOn(b.KasminaLayer, ways[way], m[0], memory)
		g.G, g.DX, g.DWeights, g.DScales, g.Bad, g.Clipped, g.Workspace = m[1], m[2], m[3], m[4], m[5], m[5].Offset(4*seeds), m[6]
		if b.Telemetry {
			g.Figures = m[7]
		}
		return k.kernelSet.KasminaBackward(s, g)
	}
	way, err := k.t.choose(j)
	if err != nil {
		return err
	}
	b.KasminaLayer = k.kasminaIn(b.KasminaLayer, ways[way])
	return k.kernelSet.KasminaBackward(s, b)
}
