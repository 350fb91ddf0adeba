"""All checks. The last line of output has results that are the same for all versions."""

import json

import sampling
import training

print(json.dumps({**training.run_all(), **sampling.run_all()}))
