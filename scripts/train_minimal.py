"""The smallest complete loop: start here. After a kill or a stop, the same command continues.

    accelerate launch --config_file accelerate_configs/2cpu.yaml scripts/train_minimal.py

Validation accuracy after 300 steps, on 2 cores of an AMD EPYC (2026-11-28): 99.1 %. The four steps
of every data parallel recipe, and what does them here:

    process group   init_process_group(...)                 Accelerator(...), end_training()
    sampler         DistributedSampler(...), set_epoch      prepare(loader), loader.set_epoch
    DDP wrapper     DistributedDataParallel(model)          prepare(model)
    rank 0 saves    if rank == 0: torch.save(state_dict)    save_state, files.write_weights

A copy needs only `utils/run`. It waits for its checkpoints, and does not say which process hangs or
is slow. With a copy of `utils/scale`, this line after `guard` does:
`Watchdog(run, guard, accelerator, model, args.timeout)`, from `utils.scale.watchdog`.
"""

import sys
from pathlib import Path

# Finds `utils` next to this script (a copy) or one folder up (the repository).
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from utils.run import process

if __name__ == "__main__":
    process.handle_signals()  # before torch: a signal during the slow imports must not be lost

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device, set_seed
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from utils.run import ddp, entry, files, launch
from utils.run.arguments import Parser, frozen
from utils.run.ddp import seed_step
from utils.run.folder import RunFolder
from utils.run.guard import Guard
from utils.run.plan import Plan


def build_data(args):  # EDIT: data
    """Points in a plane; class 1: both coordinates have the same sign.

    A sample is (id, x, y). The id, its number in the data, names it if a step fails.
    """
    held_out = 997  # no number of processes divides it
    points = torch.randn(held_out + 2880, 2)
    labels = (points.prod(1) > 0).long()
    data = TensorDataset(torch.arange(len(points)), points, labels)
    return Subset(data, range(held_out, len(data))), Subset(data, range(held_out))


def build_model():  # EDIT: model
    layers = [nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)]
    return nn.Sequential(*layers)


def compute_loss(model, x, y):  # EDIT: loss
    return nn.functional.cross_entropy(model(x), y)


@torch.no_grad()
def evaluate(accelerator, model, loader, watch):  # EDIT: metric
    """Computes exact metrics: each held-out sample counts once, on any number of processes.

    `gather_for_metrics` drops the samples that were repeated to fill up the last batch.
    """
    model.eval()
    correct = []
    for _, x, y in watch(loader):
        correct.append(accelerator.gather_for_metrics(model(x).argmax(1) == y))
    model.train()
    return {"accuracy": torch.cat(correct).double().mean().item()}


def main():
    args = parse_args()
    # --batch_size is global: each batch is split over the processes, so every topology sees the
    # same batches in the same order.
    on_cpu = launch.set_up(args)  # network, threads, deterministic algorithms
    accelerator = Accelerator(cpu=on_cpu, **launch.accelerator_options(args))
    launch.print_banner(accelerator)
    launch.divide_batch(accelerator, args.batch_size)
    set_seed(args.seed)  # the same data and weights on every process
    train_set, val_set = build_data(args)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, 128 * accelerator.num_processes)
    plan = Plan.from_args(args, len(train_set))
    run = RunFolder(args, accelerator)
    run.open(plan)  # the folder is empty, or has a run to continue, or a finished run
    if run.finished:
        return
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)  # EDIT: optimizer
    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader
    )
    _, x, y = send_to_device(next(iter(DataLoader(val_set, 2))), accelerator.device)  # EDIT: batch
    ddp.warm_up(model, lambda: compute_loss(model, x, y))  # hidden passes, for an exact resume
    step = run.start()  # accelerator.load_state, if there is a checkpoint
    guard = Guard(accelerator, args.timeout)

    def validate(step):
        metrics = evaluate(accelerator, model, val_loader, guard.watch)
        # The highest-scoring checkpoint is kept.
        run.log("val", step, score=metrics["accuracy"], **metrics)  # EDIT: metric

    if run.evaluation_due:  # the run was stopped in it
        validate(step)
    for epoch, remaining in plan.epochs(start=step):
        train_loader.set_epoch(epoch)  # another order each epoch
        batches = remaining.rest(train_loader)  # without those before an interruption
        for step, (ids, x, y) in remaining.steps(run.timed(batches)):  # EDIT: batch
            seed_step(accelerator, args.seed, step)  # dropout draws the same masks after a restart
            loss = compute_loss(model, x, y)  # EDIT: batch
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            stop = guard.should_stop(step, [loss.detach()], [ids])  # did a process get a signal?
            if plan.log_due(step):
                mean_loss = accelerator.reduce(loss.detach(), "mean").item()  # once, not per rank
                run.log("train", step, loss=mean_loss, lr=args.lr)
            if stop or run.save_due(step):
                with run.checkpoint(step, guard, model) as folder:  # never of a diverged model
                    accelerator.save_state(folder)
            if stop:
                run.exit_preempted(step)
            if plan.evaluation_due(step):
                validate(step)  # a signal ends it at once: the restart evaluates
    metrics = evaluate(accelerator, model, val_loader, guard.watch)
    if accelerator.is_main_process:
        config = {"model": "minimal"}  # EDIT: model
        files.write_weights(run.path, accelerator.unwrap_model(model), config)
    run.finish(step, **{f"val_{name}": value for name, value in metrics.items()})
    run.close()
    accelerator.end_training()


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_training_arguments(parser, epochs=10, batch_size=96, lr=0.005)  # EDIT: defaults
    parser.add_run_arguments()
    return frozen(parser.parse_args())


if __name__ == "__main__":
    entry.run(main)
