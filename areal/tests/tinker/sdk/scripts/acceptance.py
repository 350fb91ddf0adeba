"""All checks. The last line of output has results that are the same for all versions."""

import sampling
import training
from common import end

end({**training.run_all(), **sampling.run_all()})
