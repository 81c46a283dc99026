"""`python -m hetlb.workers SETTINGS`: one worker, started by the supervisor and by nobody else."""

import sys

from hetlb.workers.worker import main

sys.exit(main())
