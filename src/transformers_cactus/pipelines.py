"""`pipeline(...)`: transformers' pipelines with the `cactus_*` options."""

from __future__ import annotations

from typing import Any

import transformers

from .configuration import RunOptions, build_rule, check_together, merged, options_of, pop_options
from .integration import enable


def pipeline(*args: Any, **kwargs: Any) -> transformers.Pipeline:
    """`transformers.pipeline`, with [`enable`] called on its model.

    For a pipeline that exists already, `enable(pipe.model)` does the same.

    Args:
        *args, **kwargs: Whatever `transformers.pipeline` takes, `assistant_model` among it, and the `cactus_*` options
            as defaults of every call. A call's own options win over them. Pipelines for images and text take neither
            outside of `generate_kwargs`.

    Returns:
        `transformers.Pipeline`: An ordinary pipeline.

    Raises:
        TypeError, ValueError: If an option is unknown or out of range, options do not go together, or the task does
            not pass one on to `generate`.

    Example:
        ```python
        pipe = transformers_cactus.pipeline(
            "text-generation", model="Qwen/Qwen3-8B", assistant_model="Qwen/Qwen3-0.6B", cactus_delta=0.5
        )
        pipe(["What is a cactus?", "Where do cactuses grow?"], batch_size=2, cactus_delta=0.75)
        ```
    """
    options = pop_options(dict(kwargs))
    given = options.keys() | ({"assistant_model"} & kwargs.keys())
    pipe = transformers.pipeline(*args, **kwargs)
    lost = sorted(given - pipe._forward_params.keys())
    if lost:
        raise TypeError(
            f"the pipeline for {pipe.task!r} does not pass {', '.join(lost)} on to the model: give them in each call "
            "as generate_kwargs={...}."
        )
    if options.get("cactus_delta") is not None or options.get("cactus_rule") is not None:
        # Without either, calls and the model's config have the say.
        options = merged(options_of(pipe.model.generation_config), options)
        rule = build_rule(options)
        assert rule is not None
        check_together(rule, RunOptions.of(options, rule))
    enable(pipe.model)
    return pipe
