"""Plans: memory, communication and time of a layout, computed in one process, without the ranks and without weights.

``engines`` has the FSDP and the Megatron engine, with or without adapters, on the meta device, in ``planned_world``; ``step_recorder``
counts what they do, and ``trace`` makes a step of that. ``compiled_plan`` plans the JAX engine: it compiles the engine's programs, and
``compiled_collectives`` reads their text.
"""
