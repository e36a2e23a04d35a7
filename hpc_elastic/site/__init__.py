"""The cluster as a run sees it: which nodes come when, and which of the user's runs gets them.

- `nodes`     the state of a node: idle, planned, busy, drained or lost
- `forecast`  when nodes are free: gaps between other jobs, the next start of a run
- `queue_model`  the queue from now on, played with the times that jobs really run
- `limits`    time limits of waiting tasks, fitted to the gaps
- `siblings`  the order of a user's runs at the nodes
- `value`     what a further node is worth to a run, and to the runs of a sweep
- `neighbours`  which nodes a run gives back for jobs of others (``launcher.give_way``)
- `harvest`   how a site lets tasks start in gaps (``launcher.harvest``)
- `policy`    the port of a run's leader: what the queue lets the run do

Other packages import the names below from here. `hpc_elastic.slurm` calls Slurm's commands, and has
no rule about them.
"""

from hpc_elastic.site.forecast import FAR_S as FAR_S
from hpc_elastic.site.forecast import SAME_S as SAME_S
from hpc_elastic.site.forecast import ExpectedStart as ExpectedStart
from hpc_elastic.site.forecast import Outlook as Outlook
from hpc_elastic.site.forecast import Shape as Shape
from hpc_elastic.site.forecast import expected_start as expected_start
from hpc_elastic.site.forecast import learned_starts as learned_starts
from hpc_elastic.site.forecast import next_start as next_start
from hpc_elastic.site.forecast import no_reserve_qos as no_reserve_qos
from hpc_elastic.site.forecast import outlook as outlook
from hpc_elastic.site.forecast import shapes as shapes
from hpc_elastic.site.forecast import soonest as soonest
from hpc_elastic.site.forecast import task_terms as task_terms
from hpc_elastic.site.forecast import without_excluded as without_excluded
from hpc_elastic.site.harvest import choose_terms as choose_terms
from hpc_elastic.site.limits import TimeSlots as TimeSlots
from hpc_elastic.site.limits import time_slots_of as time_slots_of
from hpc_elastic.site.neighbours import NodeReturn as NodeReturn
from hpc_elastic.site.nodes import NodeState as NodeState
from hpc_elastic.site.policy import OptionalCalls as OptionalCalls
from hpc_elastic.site.policy import QueueAdvice as QueueAdvice
from hpc_elastic.site.policy import QueuePolicy as QueuePolicy
from hpc_elastic.site.policy import QueueQuestion as QueueQuestion
from hpc_elastic.site.queue_model import RunTimes as RunTimes
from hpc_elastic.site.queue_model import StartTimes as StartTimes
from hpc_elastic.site.value import StepTimeModel as StepTimeModel
from hpc_elastic.site.value import most_useful_nodes as most_useful_nodes
