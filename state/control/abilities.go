package control

import "github.com/kasmina-go/kasmina/state"

// Optional abilities of the controllers in this package.
var (
	_ state.CheckingController = (*Heuristic)(nil)
	_ state.SizeLearner        = (*Heuristic)(nil)
	_ state.Affording          = (*Heuristic)(nil)
	_ state.Planner            = (*Heuristic)(nil)

	_ state.CheckingController = (*Adapters)(nil)
	_ state.SizeLearner        = (*Adapters)(nil)
	_ state.Affording          = (*Adapters)(nil)
	_ state.GradientListener   = (*Adapters)(nil)

	_ state.CheckingController = (*Depth)(nil)
	_ state.CostLearner        = (*Depth)(nil)
	_ state.Planner            = (*Depth)(nil)

	_ state.CheckingController = (*Forecast)(nil)
	_ state.CostLearner        = (*Forecast)(nil)
	_ state.PlanLearner        = (*Forecast)(nil)
	_ state.Planner            = (*Forecast)(nil)
	_ state.Narrator           = (*Forecast)(nil)
	_ state.Reviewer           = (*Forecast)(nil)

	_ state.CheckingController = (*Schedule)(nil)
	_ state.Planner            = (*Schedule)(nil)

	_ state.CheckingController = together(nil)
	_ state.CostLearner        = together(nil)
	_ state.SizeLearner        = together(nil)
	_ state.Affording          = together(nil)
	_ state.PlanLearner        = together(nil)
	_ state.Planner            = together(nil)
	_ state.Narrator           = together(nil)
	_ state.Reviewer           = together(nil)
	_ state.GradientListener   = together(nil)
)
