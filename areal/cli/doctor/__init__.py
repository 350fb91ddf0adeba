"""``areal doctor``: versions, devices, extras and engines of this environment, and one training step on two ranks against one."""
