// Command stream uses two Kasmina layers as the controller of a control loop. It computes one small batch per step,
// and changes the layers while the loop runs.
//
//	go run ./examples/stream
//
// Four machines have four heaters each, and every heater should reach a temperature of 1. The input of a step has
// one row for each machine. A row contains the last eight measured errors of each heater, which form the chunk of
// one seed. In the output, the last element of a heater's chunk is added to its power.
//
// At first, all seeds are dormant, so the power changes by the error itself, and the temperatures oscillate. Then
// the seeds of the second layer get a ConvFilter, which acts as a PID controller. Finally, the seeds of the first
// layer get a ConvFilter that averages three measurements, so that noise changes the power less.
//
// The stream computes on an NVIDIA GPU if there is one, and otherwise on the CPU.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"math"
	"math/rand/v2"
	"os"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

const (
	machines = 4 // rows of a batch
	heaters  = 4 // of a machine; seeds of a layer
	history  = 8 // features of a seed's chunk
	steps    = 100
)

func main() {
	if err := run(context.Background(), os.Stdout); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, out io.Writer) error {
	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, gorgonia.Float32, gorgonia.WithName("errors"),
		gorgonia.WithShape(machines, heaters*history))

	// A PID controller changes the power by Kp·(e₀ − e₁) + Ki·e₀ + Kd·(e₀ − 2e₁ + e₂), where e₀ is the
	// latest error.
	const kp, ki, kd = 0.5, 0.1, 0
	average, filter, err := layer(x, "average", 1./3, 1./3, 1./3)
	if err != nil {
		return err
	}

	pid, y, err := layer(filter, "pid", kp+ki+kd, -kp-2*kd, kd)
	if err != nil {
		return err
	}

	// Without a GPU, device is nil, and the stream computes on the CPU.
	device, err := cudaops.Open()
	switch {
	case err == nil:
		defer device.Close()
	case !errors.Is(err, cudaops.ErrNoDevice):
		return err
	}

	stream, err := cudaops.NewStream(device, y, cudaops.StreamOptions{})
	if err != nil {
		return err
	}
	defer stream.Close()

	plant := newPlant()
	change := make([]float32, len(plant.errors))
	for _, phase := range []struct {
		name  string
		graft *state.Lattice // its seeds start to work in this phase
	}{{"all seeds dormant", nil}, {"with PID controllers", pid}, {"with averages", average}} {
		if phase.graft != nil {
			if err := graft(phase.graft); err != nil {
				return err
			}
		}

		start := time.Now()
		var deviation, movement float64 // in the second half of the phase
		for step := range steps {
			if err := stream.Run(ctx, plant.errors, change); err != nil {
				return err
			}
			d, m := plant.step(change)
			if step >= steps/2 {
				deviation += d / (steps / 2)
				movement += m / (steps / 2)
			}
		}

		fmt.Fprintf(out, "%-21s deviation %.3f, power moves by %.3f, %v per step\n",
			phase.name+":", deviation, movement, (time.Since(start) / steps).Round(time.Microsecond))
	}

	if reason := stream.Fallback(); reason != nil {
		fmt.Fprintln(out, "no persistent kernel:", reason)
	}

	return stream.Close()
}

// layer applies a Kasmina layer to x. All seeds share slot 1, which has the weights of a ConvFilter. They
// are dormant at first.
func layer(x *gorgonia.Node, name string, weights ...float32) (*state.Lattice, *gorgonia.Node, error) {
	lattice, err := state.NewLattice(heaters, heaters*history, state.WithoutGates(),
		state.WithTelemetry(state.Telemetry{Mode: state.Off}))
	if err != nil {
		return nil, nil, err
	}

	slots := make([]float32, 2*history)
	copy(slots[history:], weights)
	w := gorgonia.NodeFromAny(x.Graph(), tensor.New(tensor.WithShape(2, history),
		tensor.WithBacking(slots)), gorgonia.WithName(name+" weights"))
	scales := gorgonia.NodeFromAny(x.Graph(), tensor.New(tensor.WithShape(2),
		tensor.WithBacking([]float32{0, 1})), gorgonia.WithName(name+" scales"))
	y, err := op.Kasmina(x, w, scales, lattice)
	return lattice, y, err
}

// graft blends the blueprint in slot 1 into all chunks of a layer. The change applies to the next batch of the
// stream.
func graft(lattice *state.Lattice) error {
	for seed := range heaters {
		if err := lattice.RequestGermination(seed, state.GerminationRequest{Slot: 1,
			Kind: blueprints.ConvFilter}); err != nil {
			return err
		}
		for _, stage := range []state.Stage{state.Training, state.Grafting} {
			if err := lattice.Transition(seed, stage); err != nil {
				return err
			}
		}
		if err := lattice.SetAlpha(seed, 1); err != nil {
			return err
		}
	}
	return nil
}

// plant simulates the heaters.
type plant struct {
	temperature, power []float64
	errors             []float32 // a batch
	noise              *rand.Rand
}

func newPlant() *plant {
	p := &plant{temperature: make([]float64, machines*heaters), power: make([]float64, machines*heaters),
		errors: make([]float32, machines*heaters*history), noise: rand.New(rand.NewPCG(1, 1))}
	for i := range p.errors {
		p.errors[i] = 1
	}
	return p
}

// step simulates one step of all heaters: it updates their temperatures and their power, and measures the errors.
// It returns the mean deviation from the desired temperature and the mean change of the power.
func (p *plant) step(change []float32) (deviation, movement float64) {
	for i := range p.temperature {
		p.temperature[i] += 0.2 * (p.power[i] - p.temperature[i])
		latest := i*history + history - 1
		p.power[i] += float64(change[latest])
		deviation += math.Abs(1-p.temperature[i]) / (machines * heaters)
		movement += math.Abs(float64(change[latest])) / (machines * heaters)

		copy(p.errors[i*history:], p.errors[i*history+1:latest+1])
		p.errors[latest] = float32(1 - p.temperature[i] + 0.05*p.noise.NormFloat64())
	}
	return deviation, movement
}
