"""One rank that takes the same PPO steps twice: of whole mini-batches as verl does, and of parts as they would come.

``ranks.py`` calls :func:`main` on each rank.
"""

import json
import os
from functools import partial

import torch
import torch.distributed as dist
from engine_steps import build, make_batch, ppo


def split(rows, rank, ranks):
    """This rank's, of rows that are dealt out as verl does: in blocks."""
    share = len(rows) // ranks
    return rows[rank * share : (rank + 1) * share]


def chosen(batch, rows, dynamic):
    """Rows of a batch, with what travels beside its tensors."""
    import verl.utils.tensordict_utils as tu

    part = tu.index_select_tensor_dict(batch, rows)
    tu.assign_non_tensor(part, use_dynamic_bsz=dynamic, max_token_len_per_gpu=48, micro_batch_size_per_gpu=1)
    return part


def train(engine, steps, parts, loss, streamed, by_tokens=True, dynamic=False):
    """By step: the loss over all ranks, the gradient's norm, and this rank's summed metric; of ranks that have them."""
    from verl_rhyme.actor.streamed_update import StreamedUpdate

    rank, ranks = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    shares = [split(part, rank, ranks) for part in parts]
    reported = []
    for step in range(steps):
        batch = make_batch(seed=step)
        if streamed:
            update = StreamedUpdate(engine, loss, by_tokens)
            for share in shares:
                with engine.eval_mode():  # as its old log-probs are computed before
                    engine.infer_batch(chosen(batch, share, dynamic))
                update.add(chosen(batch, share, dynamic))
            done = update.finish()
        else:
            rows = [row for share in shares for row in share]
            with engine.train_mode():
                done = engine.train_batch(chosen(batch, rows, dynamic), loss_function=loss)
        if engine.is_mp_src_rank_with_outputs():
            value = torch.tensor(sum(done["loss"]))
            dist.all_reduce(value, group=engine.get_data_parallel_group())
            metrics = done["metrics"]
            reported.append([value.item() / ranks, metrics["grad_norm"], metrics["actor/pg_loss"].aggregate()])
    return reported


def main(engine, model, port, parts, cases, steps=10, tp=1, pp=1, options=None, dynamic=False):
    """Print ``{"whole", "streamed", "apart", "moved"}`` of each case: what steps report, how far the weights are from
    each other afterwards, and how far from where they were.

    ``parts`` are rows of the mini-batch as they come; ``cases`` change the actor's options, and may contain
    ``by_tokens`` of :class:`StreamedUpdate`; ``dynamic``: micro-batches by tokens. Ranks beyond ``tp * pp`` are data
    parallel.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("cpu:gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    make = partial(build, engine, model, tp, pp, 3e-4, options)
    reported = [compare(make, steps, parts, dynamic, **case) for case in cases]
    if None not in reported:
        print("RESULT" + json.dumps(reported))
    dist.barrier()
    dist.destroy_process_group()


def compare(make, steps, parts, dynamic, by_tokens=True, **changes):
    """What :func:`main` prints of a case, on the rank that has it; ``None`` on the others."""
    loss, found = ppo(**changes), []
    for streamed in (False, True):
        built = make()
        before = weights(built)
        reported = train(built, steps, parts, loss, streamed, by_tokens, dynamic)
        found.append((reported, before, weights(built)))
    (whole, before, after), (streamed, _, ours) = found
    if not built.is_mp_src_rank_with_outputs() or built.get_data_parallel_rank() != 0:
        return None
    return {"whole": whole, "streamed": streamed, "apart": farthest(after, ours), "moved": farthest(before, after)}


def weights(engine):
    return {name: tensor.detach().float().clone() for name, tensor in engine.get_per_tensor_param()[0]}


def farthest(one, other):
    return max((other[name] - tensor).abs().max().item() for name, tensor in one.items())
