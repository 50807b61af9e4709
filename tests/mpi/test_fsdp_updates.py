"""FSDP: when parameters are gathered anew, and which optimisers may update them."""

import contextlib

import numpy as np
import pytest

import mpipar as mp
from mpipar.errors import ConfigError, StateError
from tests.mpi.helpers import backward, full, model, tokens


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "SHARD_OPTIMIZER", "FULL_SHARD"])
def test_parameters_that_stay_are_gathered_once(comm: mp.Communicator, strategy: str) -> None:
    """After an update or a load the next forward gathers them; all give the right values."""
    tokens_in, alone = tokens()[:, :-1], model()
    with mp.FSDP(model(), comm, full(strategy), op="sum") as net:
        optimizer = mp.optim.SGD(net.parameters(), lr=0.1)

        def gathers(times: int = 1) -> int:
            before = comm.calls["all_gather"]
            for _ in range(times):
                with mp.no_grad():
                    found = net(tokens_in).data
            sent = comm.calls["all_gather"] - before
            alone.load_state_dict(net.full_state_dict())
            np.testing.assert_allclose(found, alone(tokens_in).data, atol=1e-12)
            return sent

        stays, all_units = strategy != "FULL_SHARD", 5 if comm.size > 1 else 0
        for _ in range(2):
            net.zero_grad()
            backward(net, comm)
            gathers()  # the update is still to come
            optimizer.step()
            assert gathers(3) == all_units * (1 if stays else 3)
            if comm.rank == 0:
                net.state_dict(), net.parameters()  # reading is everybody's own affair
            assert gathers(2) == all_units * (0 if stays else 2)
        net.load_full_state_dict({name: 2 * v for name, v in net.full_state_dict().items()})
        assert gathers(2) == all_units * (1 if stays else 2)
        net.load_state_dict({name: 2 * v for name, v in net.state_dict().items()})
        assert gathers(2) == all_units * (1 if stays else 2)
        with net.whole_parameters(), mp.no_grad():
            for _ in range(comm.rank):
                net(tokens_in)
        assert gathers(2) == all_units * (0 if stays else 2)
        before = comm.calls["all_gather"]
        for number in range(3):  # micro-batches
            with net.no_sync() if number < 2 else contextlib.nullcontext():
                backward(net, comm)
        again = 3 if all_units else 0  # in backward: the last one is still there
        assert comm.calls["all_gather"] - before == (0 if stays else 3 * (all_units + again))
        optimizer.step()
        gathers()
        for param in net.parameters():
            param.data[...] *= 2
        with pytest.raises(StateError, match="shard_parameters"):
            net(tokens_in)
        net.shard_parameters()
        assert gathers(2) == all_units * (1 if stays else 2)


def test_an_optimiser_of_the_modules_own_parameters(comm: mp.Communicator) -> None:
    made = model()
    optimizer = mp.optim.AdamW(made.parameters())
    with mp.FSDP(made, comm, full(), op="sum") as net:
        backward(net, comm)
        with pytest.raises(ConfigError, match="after FSDP"):
            optimizer.step()
    made.zero_grad()
    optimizer.step()  # they are whole again
