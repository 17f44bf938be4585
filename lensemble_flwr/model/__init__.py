"""The world model: encoder, predictor, action heads, SIGReg, objective, and how it is trained and measured.

Plain torch; imports nothing of this project but its errors. A federation participant uses it like this::

    warm = load_warm_start(path, pinned_hash)
    model, layout = warm.build_model(), ParameterLayout.of(warm.model_spec, "adapter")
    state = InnerState.start(warm.head("lander"))
    result = inner_steps(model, layout, theta, data, state, steps=H, spec=inner, objective=goal, sketch_seed=s_t)
    delta = result.theta - theta
"""

from lensemble_flwr.model.encoder import Encoder
from lensemble_flwr.model.evaluate import (
    Probe,
    Scores,
    effective_rank,
    evaluate,
    fit_probe,
    forgetting,
    open_loop,
    probe_rmse,
    relative_error,
    score,
)
from lensemble_flwr.model.heads import ActionHead, head_from_state
from lensemble_flwr.model.inner import (
    AdapterProblem,
    InnerResult,
    InnerState,
    adapter_problem,
    inner_steps,
    resolve_device,
)
from lensemble_flwr.model.layout import SURFACES, ParameterLayout
from lensemble_flwr.model.objective import LossTerms, Objective
from lensemble_flwr.model.predictor import Adapter, Predictor
from lensemble_flwr.model.sigreg import sigreg, sketch_directions, sketch_hash
from lensemble_flwr.model.spec import (
    PRESETS,
    HeadSpec,
    InnerSpec,
    ModelSpec,
    ObjectiveSpec,
    WarmStartSpec,
    from_plain,
    preset,
    to_plain,
)
from lensemble_flwr.model.trajectories import LatentTrajectories, Trajectories, join
from lensemble_flwr.model.warmstart import (
    WarmStart,
    adapter_features,
    fit_public_basis,
    load_warm_start,
    save_warm_start,
    train_warm_start,
)
from lensemble_flwr.model.world_model import WorldModel, encode_trajectories, frame_surface, state_digest

__all__ = [
    "PRESETS",
    "SURFACES",
    "ActionHead",
    "Adapter",
    "AdapterProblem",
    "Encoder",
    "HeadSpec",
    "InnerResult",
    "InnerSpec",
    "InnerState",
    "LatentTrajectories",
    "LossTerms",
    "ModelSpec",
    "Objective",
    "ObjectiveSpec",
    "ParameterLayout",
    "Predictor",
    "Probe",
    "Scores",
    "Trajectories",
    "WarmStart",
    "WarmStartSpec",
    "WorldModel",
    "adapter_features",
    "adapter_problem",
    "effective_rank",
    "encode_trajectories",
    "evaluate",
    "fit_probe",
    "fit_public_basis",
    "forgetting",
    "frame_surface",
    "from_plain",
    "head_from_state",
    "inner_steps",
    "join",
    "load_warm_start",
    "open_loop",
    "preset",
    "probe_rmse",
    "relative_error",
    "resolve_device",
    "save_warm_start",
    "score",
    "sigreg",
    "sketch_directions",
    "sketch_hash",
    "state_digest",
    "to_plain",
    "train_warm_start",
]
