"""The public names of mpipar, and the modules that they come from."""

from . import errors as errors
from . import functional as functional
from . import models as models
from . import nn as nn
from . import optim as optim
from . import partition as partition
from . import rng as rng
from . import schedule as schedule
from .autograd import Function as Function
from .autograd import Tensor as Tensor
from .autograd import add_pump as add_pump
from .autograd import after_backward as after_backward
from .autograd import backward as backward
from .autograd import from_dlpack as from_dlpack
from .autograd import gradcheck as gradcheck
from .autograd import is_grad_enabled as is_grad_enabled
from .autograd import no_grad as no_grad
from .autograd import recompute as recompute
from .comm.calls import algorithms as algorithms
from .errors import MpiparError as MpiparError
from .nn import Partial as Partial
from .nn import Replicate as Replicate
from .nn import Shard as Shard
from .nn import Spec as Spec
from .parallel.clip import clip_factor as clip_factor
from .parallel.clip import clip_grad_norm as clip_grad_norm
from .parallel.communicator import Communicator as Communicator
from .parallel.data import sum_gradients as sum_gradients
from .parallel.data_parallel import DataParallel as DataParallel
from .parallel.loss import token_mean as token_mean
from .parallel.mesh import Mesh as Mesh
from .parallel.powersgd import PowerSGD as PowerSGD
from .parallel.replicated import all_gather_sequence as all_gather_sequence
from .parallel.replicated import copy_to as copy_to
from .parallel.replicated import gather_from as gather_from
from .parallel.replicated import reduce_from as reduce_from
from .parallel.replicated import reduce_scatter_sequence as reduce_scatter_sequence
from .parallel.replicated import scatter_to as scatter_to
from .parallel.synchronizer import GradientSynchronizer as GradientSynchronizer
from .parallel.tensor import ColumnParallelLinear as ColumnParallelLinear
from .parallel.tensor import RowParallelLinear as RowParallelLinear
from .parallel.tensor import TensorParallel as TensorParallel
from .parallel.vocab import VocabParallelEmbedding as VocabParallelEmbedding
from .parallel.vocab import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy

__version__: str
