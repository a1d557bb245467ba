"""The smallest complete loop: start here. Killed or stopped at any moment, the same command continues.

    accelerate launch --config_file accelerate_configs/2cpu.yaml scripts/train_minimal.py

Validation accuracy on 2 CPU cores (2026-11-22): 98.3 % after 300 steps. The four steps of every data parallel recipe:

    process group   init_process_group(...), destroy_process_group()     Accelerator(...), accelerator.end_training()
    sampler         DistributedSampler(...), sampler.set_epoch(epoch)    accelerator.prepare(loader), loader.set_epoch(epoch)
    DDP wrap        DistributedDataParallel(model.to(rank), [rank])      accelerator.prepare(model)
    rank 0 saves    if rank == 0: torch.save(model.module.state_dict())  accelerator.save_state, weights.export
"""

import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # finds `utils` next to this script (a copy) or one folder up
from utils import exits

if __name__ == "__main__":
    exits.install()  # records signals, and makes this process exit when the launcher dies

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from utils import topology, weights
from utils.arguments import Parser
from utils.guard import Guard
from utils.plan import Plan
from utils.run_folder import RunFolder


@torch.no_grad()
def evaluate(accelerator, model, loader):
    """The metric of the held-out data; counts each sample once: `gather_for_metrics` drops those repeated in the last batch."""
    model.eval()
    correct = [accelerator.gather_for_metrics(model(x).argmax(1) == y) for _, x, y in loader]
    model.train()
    return torch.cat(correct).double().mean().item()  # EDIT: metric


def main():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_training_arguments(parser, epochs=10, batch_size=96, lr=0.005)
    parser.add_run_arguments()
    args = parser.parse_args()
    loading = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=args.seed)  # global batches
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=args.timeout))
    accelerator = Accelerator(cpu=topology.check_launch(training=True), dataloader_config=loading, kwargs_handlers=[timeout])
    topology.print_banner(accelerator, args.batch_size)
    set_seed(args.seed)  # the same points and weights on every process
    held_out, points = 997, torch.randn(997 + max(2880, args.batch_size), 2)  # 997: no number of processes divides it
    labels = (points.prod(1) > 0).long()  # class 1: both numbers have the same sign
    data = TensorDataset(torch.arange(len(points)), points, labels)  # EDIT: data; a batch is (ids, inputs, labels)
    train_loader = DataLoader(Subset(data, range(held_out, len(data))), args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(Subset(data, range(held_out)), 128 * accelerator.num_processes)
    plan = Plan.from_args(args, len(train_loader.dataset))
    run = RunFolder(args, accelerator)
    run.open(plan)  # the folder is empty, or has a run to continue, or a finished run
    if run.finished:
        return
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))  # EDIT: model
    weights.initialize(accelerator, model, run.init_from)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)
    topology.set_up_ddp(accelerator, model, data[:2][1].to(accelerator.device))  # for an exact resume
    step = run.start()  # accelerator.load_state, if there is a checkpoint
    guard = Guard(accelerator, args.timeout)
    for epoch, todo in plan.epochs(start=step):
        train_loader.set_epoch(epoch)  # another order each epoch
        batches = skip_first_batches(train_loader, todo.batches_done)
        for step, micro_batches in todo.steps(run.timed(batches)):
            ids, x, y = next(micro_batches)  # the only one: no gradient accumulation here
            loss = nn.functional.cross_entropy(model(x), y)  # EDIT: loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            stop = guard.should_stop(step, [loss.detach()], [ids])  # did any process receive a signal?
            if plan.log_due(step):
                run.log("train", step, loss=accelerator.reduce(loss.detach(), "mean").item(), lr=args.lr)  # once, not per rank
            if plan.evaluation_due(step):
                accuracy = evaluate(accelerator, model, val_loader)
                run.log("val", step, score=accuracy, accuracy=accuracy)  # the checkpoint with the best score is kept
            if stop or plan.save_due(step, improved=run.improved_at(step)):
                guard.check(model)  # a checkpoint never holds a diverged model
                with run.checkpoint(step) as folder:
                    accelerator.save_state(folder)
            if stop and step < plan.total_steps:
                run.exit_preempted(step)
    if accelerator.is_main_process:
        weights.export(run.path, accelerator.unwrap_model(model), {"model": "minimal"})  # names without "module."
    run.finish(step, val_accuracy=evaluate(accelerator, model, val_loader))
    accelerator.end_training()


if __name__ == "__main__":
    exits.run(main)
