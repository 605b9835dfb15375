package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
)

// Client asks a board. Its methods may be called from any goroutine.
type Client struct {
	URL   string       // of the page, such as http://127.0.0.1:6060/
	Token string       // for commands; the board prints it
	Who   string       // for the record
	HTTP  *http.Client // nil for http.DefaultClient
}

// maxAnswer bounds what a client reads.
const maxAnswer = 1 << 28

// Runs returns where the board's runs stand.
func (c *Client) Runs(ctx context.Context) (runs []Run, err error) {
	return runs, c.call(ctx, "GET", "runs", nil, &runs)
}

// Run returns where a run stands.
func (c *Client) Run(ctx context.Context, run string) (r Run, err error) {
	return r, c.call(ctx, "GET", "runs/"+url.PathEscape(run), nil, &r)
}

// Reports returns the reports of the run's lattices, as a controller takes them. There are none
// before the run has begun.
func (c *Client) Reports(ctx context.Context, run string) ([]state.Report, error) {
	var all []Report
	if err := c.call(ctx, "GET", "runs/"+url.PathEscape(run)+"/reports", nil, &all); err != nil {
		return nil, err
	}
	reports := make([]state.Report, len(all))
	for i, r := range all {
		var err error
		if reports[i], err = r.state(); err != nil {
			return nil, fmt.Errorf("board/api: layer %d: %w", i, err)
		}
	}
	return reports, nil
}

// Do carries out commands after the present step: all of them, or, when one is refused, none. It
// waits for the end of the step, however long that takes, until ctx ends.
func (c *Client) Do(ctx context.Context, run string, commands ...state.Command) error {
	return c.order(ctx, run, "commands", Commands{Request{Who: c.Who}, commands})
}

// Measure changes the telemetry of all lattices after the present step, and waits as Do does.
func (c *Client) Measure(ctx context.Context, run string, mode state.TelemetryMode,
	every int) error {
	return c.order(ctx, run, "telemetry", Telemetry{Request{Who: c.Who}, mode.String(), every})
}

// Save has the run save a checkpoint after its present step, and waits as Do does.
func (c *Client) Save(ctx context.Context, run string) error {
	return c.order(ctx, run, "save", Request{Who: c.Who})
}

// Stop ends the run after its present step.
func (c *Client) Stop(ctx context.Context, run, why string) error {
	return c.order(ctx, run, "stop", Request{c.Who, why})
}

// pollEvery is the interval at which a client queries a pending order.
const pollEvery = 500 * time.Millisecond

// order gives an order, and waits until it has been granted or refused.
func (c *Client) order(ctx context.Context, run, path string, body any) error {
	runs := "runs/" + url.PathEscape(run) + "/"
	var o Order
	if err := c.call(ctx, "POST", runs+path, body, &o); err != nil {
		return err
	}

	for o.State == Pending {
		select {
		case <-ctx.Done():
			return fmt.Errorf("board/api: order %d is still pending, and may yet take effect: %w",
				o.ID, context.Cause(ctx))
		case <-time.After(pollEvery):
		}
		if err := c.call(ctx, "GET", fmt.Sprint(runs, "orders/", o.ID), nil, &o); err != nil {
			return err
		}
	}

	if o.State == Refused {
		return fmt.Errorf("board/api: POST %s%s: %w: %s", runs, path, ErrRefused, o.Error)
	}
	return nil
}

// Follow lets a controller grow the run's model, from this process. Whenever an epoch has ended it
// is asked, and each of its commands takes effect or is refused by itself. refused, if it is not
// nil, hears of those. Follow returns nil when the run has ended.
func (c *Client) Follow(ctx context.Context, run string, controller state.Controller,
	refused func(state.Command, error)) error {
	if controller == nil {
		return errors.New("board/api: Follow: the controller is nil")
	}
	for epoch := 0; ; {
		r, err := c.Run(ctx, run)
		if err != nil {
			return err
		}
		switch r.State {
		case "ended", "stopped", "failed":
			return nil
		}
		if r.Epoch <= epoch {
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-time.After(100 * time.Millisecond):
			}
			continue
		}
		reports, err := c.Reports(ctx, run)
		if err != nil {
			return err
		}
		epoch = r.Epoch // of which a run without seeds has no reports
		for _, r := range reports {
			epoch = max(epoch, r.Epoch)
		}
		for _, command := range controller.Decide(reports) {
			err := c.Do(ctx, run, command)
			switch {
			case err != nil && !errors.Is(err, ErrRefused):
				return err
			case err != nil && refused != nil:
				refused(command, err)
			}
		}
	}
}

// ErrRefused is wrapped by the error of a command that the run could not carry out.
var ErrRefused = errors.New("refused")

// call asks, and reads the answer.
func (c *Client) call(ctx context.Context, method, path string, body, to any) error {
	fail := func(err error) error {
		return fmt.Errorf("board/api: %s %s: %w", method, path, err)
	}
	var text []byte
	if body != nil {
		var err error
		if text, err = json.Marshal(body); err != nil {
			return fail(err)
		}
	}
	r, err := http.NewRequestWithContext(ctx, method,
		strings.TrimSuffix(c.URL, "/")+"/api/v1/"+path,
		bytes.NewReader(text))
	if err != nil {
		return fail(err)
	}
	if body != nil {
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Authorization", "Bearer "+c.Token)
	}
	client := c.HTTP
	if client == nil {
		client = http.DefaultClient
	}
	response, err := client.Do(r)
	if err != nil {
		return fail(err)
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(response.Body, maxAnswer))
	if err != nil {
		return fail(err)
	}
	if response.StatusCode >= 400 {
		var why struct{ Error string }
		if json.Unmarshal(answer, &why) != nil || why.Error == "" {
			why.Error = response.Status
		}
		err := errors.New(why.Error)
		if response.StatusCode == http.StatusConflict {
			err = fmt.Errorf("%w: %w", ErrRefused, err)
		}
		return fail(err)
	}
	if to == nil {
		return nil
	}
	if err := json.Unmarshal(answer, to); err != nil {
		return fail(err)
	}
	return nil
}

// state returns the report as a controller takes it.
func (r Report) state() (state.Report, error) {
	s := state.Report{Epoch: r.Epoch, Step: r.Step, Hidden: r.Hidden, Slots: r.Slots,
		SlotParameters: r.SlotParameters, Seeds: make([]state.SeedReport, len(r.Seeds))}
	if err := s.Site.UnmarshalText([]byte(r.Site)); err != nil {
		return s, err
	}
	for i, seed := range r.Seeds {
		var err error
		if s.Seeds[i], err = seed.state(); err != nil {
			return s, fmt.Errorf("seed %d: %w", i, err)
		}
	}
	return s, nil
}

func (a Seed) state() (s state.SeedReport, err error) {
	for s.Stage = state.Dormant; s.Stage.String() != a.Stage; s.Stage++ {
		if s.Stage > state.RolledBack {
			return s, fmt.Errorf("the stage %.40q is not known", a.Stage)
		}
	}
	if a.Kind != "" {
		kind, ok := blueprints.ByName(a.Kind)
		if !ok {
			return s, fmt.Errorf("the kind %.40q is not known here", a.Kind)
		}
		s.Kind = kind
	}
	s.Seed, s.Slot, s.Size, s.Alpha = a.Seed, a.Slot, a.Size, float64(a.Alpha)
	s.EpochsInStage, s.LastUpdate = a.Epochs, a.LastUpdate
	s.Performance, s.Stability = float64(a.Performance), float64(a.Stability)
	s.Delta, s.Improvement = float64(a.Delta), float64(a.Improvement)
	s.CanAdvance, s.RampFinished, s.CanCull, s.CanRecycle = a.CanAdvance, a.RampOver,
		a.CanCull, a.CanRecycle
	s.Drift, s.NonFiniteX, s.Clips = float64(a.Drift), a.NonFinite, a.Clips
	s.Health = state.Health{Variance: float64(a.Variance),
		Mean: float64(a.Mean), Min: float64(a.Min),
		Max: float64(a.Max), DeadRatio: float64(a.DeadRatio), SNR: float64(a.SNR)}
	s.Gradient = state.Gradient{Norm: float64(a.GradNorm), Variance: float64(a.GradVar),
		Max: float64(a.GradMax)}
	return s, nil
}
