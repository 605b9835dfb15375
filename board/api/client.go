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

// A Client talks to a board. Its methods may be called from any goroutine.
type Client struct {
	// URL is the address that the board prints, such as http://127.0.0.1:6060/#token=SECRET.
	URL string

	// Token permits steering. If it is empty, the client uses the token in the URL.
	Token string

	Who  string       // name of this program, for the run's log
	HTTP *http.Client // nil for http.DefaultClient
}

// address returns the base of the board's paths, without a slash at the end, and the token.
func (c *Client) address() (base, token string, err error) {
	u, err := url.Parse(strings.TrimSpace(c.URL))
	if err != nil {
		return "", "", err
	}
	if u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return "", "", fmt.Errorf("the URL %q is not a board's: use the address that the board "+
			"prints, such as http://127.0.0.1:6060/", c.URL)
	}

	token = c.Token
	if token == "" {
		// A fragment has the form of a query.
		if values, err := url.ParseQuery(u.EscapedFragment()); err == nil {
			token = values.Get("token")
		}
	}
	u.Fragment, u.RawFragment, u.RawQuery = "", "", ""
	return strings.TrimSuffix(u.String(), "/"), token, nil
}

// maxAnswer limits the size of an answer.
const maxAnswer = 1 << 28

// Runs returns the status of all runs.
func (c *Client) Runs(ctx context.Context) (runs []Run, err error) {
	return runs, c.call(ctx, "GET", "runs", nil, &runs)
}

// Run returns the status of a run.
func (c *Client) Run(ctx context.Context, run string) (r Run, err error) {
	return r, c.call(ctx, "GET", "runs/"+url.PathEscape(run), nil, &r)
}

// Reports returns the reports of the run's lattices, the input of a controller. There are none
// before the run has started.
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

// Do carries out commands after the current step. If any command is rejected, none takes effect. Do waits
// until the step ends or ctx is done.
func (c *Client) Do(ctx context.Context, run string, commands ...state.Command) error {
	return c.order(ctx, run, "commands", Commands{Request{Who: c.Who}, commands})
}

// Measure changes the telemetry of all lattices after the current step. Like [Client.Do], it waits
// for the result.
func (c *Client) Measure(ctx context.Context, run string, mode state.TelemetryMode,
	every int) error {
	return c.order(ctx, run, "telemetry", Telemetry{Request{Who: c.Who}, mode.String(), every})
}

// Save saves a checkpoint after the current step. Like [Client.Do], it waits for the result.
func (c *Client) Save(ctx context.Context, run string) error {
	return c.order(ctx, run, "save", Request{Who: c.Who})
}

// Stop ends the run after the current step.
func (c *Client) Stop(ctx context.Context, run, why string) error {
	return c.order(ctx, run, "stop", Request{c.Who, why})
}

// pollEvery is the interval between a client's queries about a pending order.
const pollEvery = 500 * time.Millisecond

// order sends a request to the run and waits for the result.
func (c *Client) order(ctx context.Context, run, path string, body any) error {
	runs := "runs/" + url.PathEscape(run) + "/"
	var o Order
	if err := c.call(ctx, "POST", runs+path, body, &o); err != nil {
		if ctx.Err() != nil { // the run may have received the order, and only the answer is missing
			return fmt.Errorf("%w: the order may yet take effect", err)
		}
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
			return fmt.Errorf("%w: order %d was pending, and may yet take effect", err, o.ID)
		}
	}

	if o.State == Refused {
		return fmt.Errorf("board/api: POST %s%s: %w: %s", runs, path, ErrRefused, o.Error)
	}
	return nil
}

// Follow lets a controller in this process grow the run's model. After every epoch, it passes the
// reports to the controller and sends each of the resulting commands to the run. If the run rejects a
// command, Follow calls refused, unless it is nil, and continues. Follow returns nil when the run
// ends.
func (c *Client) Follow(ctx context.Context, run string, controller state.Controller,
	refused func(state.Command, error)) error {
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
		epoch = r.Epoch // a run without seeds has no reports
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

// ErrRefused is wrapped by the error of every request that the run rejects.
var ErrRefused = errors.New("refused")

// call sends a request and decodes the answer into to.
func (c *Client) call(ctx context.Context, method, path string, body, to any) error {
	fail := func(err error) error {
		return fmt.Errorf("board/api: %s %s: %w", method, path, err)
	}

	base, token, err := c.address()
	if err != nil {
		return fail(err)
	}
	var text []byte
	if body != nil {
		if text, err = json.Marshal(body); err != nil {
			return fail(err)
		}
	}
	r, err := http.NewRequestWithContext(ctx, method, base+"/api/v1/"+path, bytes.NewReader(text))
	if err != nil {
		return fail(err)
	}
	if body != nil {
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Authorization", "Bearer "+token)
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

// state converts the report for a controller.
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

// state converts the seed for a controller.
func (a Seed) state() (s state.SeedReport, err error) {
	for s.Stage = state.Dormant; s.Stage.String() != a.Stage; s.Stage++ {
		if s.Stage > state.RolledBack {
			return s, fmt.Errorf("unknown stage %.40q", a.Stage)
		}
	}
	if a.Kind != "" {
		kind, ok := blueprints.ByName(a.Kind)
		if !ok {
			return s, fmt.Errorf("unknown blueprint %.40q", a.Kind)
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
