"""What `selfattn.steps.layers` has, under its public path."""

from selfattn.steps.layers import (
    AdditiveSteps,
    LayerParameters,
    LayerSteps,
    ModelSteps,
    layer_steps,
    model_steps,
)

__all__ = ["AdditiveSteps", "LayerParameters", "LayerSteps", "ModelSteps", "layer_steps", "model_steps"]
