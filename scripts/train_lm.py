"""Language models with tokens and pretrained weights, trained in full or with LoRA.

Shows what a language model of `transformers` needs in the loop of train_cifar.py: documents of very
different length in one batch, a loss over the tokens of the answers only, adapters, and a model
sharded over GPUs (FSDP2). Needs more packages: pip install -r scripts/requirements_lm.txt

    python scripts/train_lm.py
    accelerate launch --config_file accelerate_configs/1gpu.yaml scripts/train_lm.py \\
        --model HuggingFaceTB/SmolLM2-135M --dataset my_texts/
    accelerate launch --config_file accelerate_configs/4gpu_fsdp.yaml scripts/train_lm.py \\
        --model Qwen/Qwen3-8B --dataset chats.jsonl --lora_rank 16
    accelerate launch --config_file accelerate_configs/4gpu.yaml scripts/train_lm.py \\
        --model my_config/ --from_scratch --dataset HuggingFaceFW/fineweb-edu --subset sample-10BT
    python scripts/train_lm.py --generate runs/train_lm --prompt "the third of May, 1994"

The first command needs no network: it trains a small model from scratch to write dates in ISO 8601.
Measured on 2026-11-26 on 2 cores of an AMD EPYC: 75 s, validation loss 1.02 nats per token. After
100 steps, SmolLM2-135M-Instruct answers 99 of 100 held-out questions exactly (4 before), in bf16.
"""

import importlib.util
import math
import sys
from functools import partial
from pathlib import Path

# Finds `utils` next to this script (a copy) or one folder up (the repository).
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from utils.run import process

if __name__ == "__main__":
    process.handle_signals()  # before torch: a signal during the slow imports must not be lost

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device, set_seed
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from utils import flags, schedule
from utils.compilation import compile_model, make_attention_deterministic
from utils.data import evaluation
from utils.data.loaders import EpochSampler, explain, fit_batch_size, loader_options
from utils.data.sharing import agree, evaluation_batch_size, local_main_first
from utils.language.conversations import Encoder
from utils.language.lanes import LaneStream, Share, gather_position
from utils.language.packing import TokenSettings
from utils.language.tokens import count_lanes, load_held_out, load_tokens, open_stream
from utils.report import model_card, plots
from utils.report.mfu import peak_flops
from utils.report.tracking import Trackers, start_profiler
from utils.run import ddp, entry, launch
from utils.run.arguments import Parser, frozen, number
from utils.run.collectives import run_on_all, run_on_main
from utils.run.ddp import seed_step
from utils.run.failures import UserError
from utils.run.files import read_json, write_text
from utils.run.folder import RunFolder
from utils.run.guard import Guard
from utils.run.output import notice, plural
from utils.run.plan import Plan
from utils.scale import elastic, fsdp
from utils.scale.saving import BackgroundWriter
from utils.scale.watchdog import Watchdog

MISSING = [name for name in ("transformers", "peft") if importlib.util.find_spec(name) is None]
if not MISSING:
    from utils.language import adapters, causal_lm, lm_loss


def check_packages():
    """Raises UserError if a package is missing that only this script needs."""
    if MISSING:
        raise UserError(
            f"train_lm.py needs {' and '.join(MISSING)}: pip install -r scripts/requirements_lm.txt"
        )


SHORT = 50  # steps: a shorter run gets a notice
SAMPLE_TOKENS, ANSWER_TOKENS = 64, 512  # generated at most: during training, for --generate
LORA_DROPOUT = 0.0  # of the inputs of LoRA's adapters
ANSWERS = 100  # held-out conversations whose answers are compared, of --dataset synthetic


# --------------------------------------------------------------------------------- model and data


def load_settings(args):
    """The tokenizer, the configuration of the model, and what identifies its weights."""
    tokenizer = causal_lm.load_tokenizer(args.model, args.chat_template)
    config = causal_lm.load_config(args.model, tokenizer, args.block_size)
    return tokenizer, config, causal_lm.fingerprint(args.model)


def build_model(accelerator, config, args):  # EDIT: model
    """Loads the model, and adds the adapters of LoRA if --lora_rank asks for them.

    Its forward pass takes `input_ids`, `position_ids` and `targets`, each int64 [batch, time], and
    returns the sum of the losses of the targets, in nats.
    """
    causal_lm.check_memory(accelerator, config, args)
    model = causal_lm.load_model(accelerator, config, args)
    if args.attention == "auto":
        lm_loss.attend_by_document(accelerator, model)
    if args.activation_checkpointing:
        # Keeps only the input of each block and recomputes the rest in the backward pass.
        model.activation_checkpointing_enable({"use_reentrant": False})
    if args.lora_rank:
        model = adapters.add_lora(
            model, args.lora_rank, args.lora_alpha, LORA_DROPOUT, args.lora_targets.split(",")
        )
    lm_loss.chunk_loss(model)
    make_attention_deterministic()
    fsdp.use_model_blocks(accelerator, model)
    compile_model(accelerator, fsdp.blocks(model), args.compile)
    return model


def rates_per_block(accelerator, model, args):
    """What is logged besides the blocks per second, for `run.start`: positions, and if known MFU.

    FLOPs per position are 4 N + 2 M + 12 L H T, as in PaLM (arXiv:2204.02311, appendix B): of N
    weights that are multiplied, M are trained. Those of experts depend on the tokens: no MFU.
    """
    config, peak = model.config.get_text_config(), peak_flops(accelerator)
    rates = {"tokens_per_second": args.block_size}
    if peak is None or getattr(config, "num_experts_per_tok", None):
        return rates
    looked_up = model.get_input_embeddings().weight
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    if not config.tie_word_embeddings:
        matrices = [weight for weight in matrices if weight is not looked_up]
    flops = sum(weight.numel() * (6 if weight.requires_grad else 4) for weight in matrices)
    flops += 12 * config.num_hidden_layers * config.hidden_size * args.block_size
    return rates | {"mfu": args.block_size * flops / peak}


def count_parameters(model):
    """The number of parameters, and how many of them are trained."""
    sizes = [(weight.numel(), weight.requires_grad) for weight in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def build_optimizer(model, args):
    """AdamW, without weight decay for the embedding and for vectors: norms and biases."""
    embeddings = [layer for layer in model.modules() if isinstance(layer, torch.nn.Embedding)]
    looked_up = {weight for layer in embeddings for weight in layer.parameters()}
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    decayed = [weight for weight in trained if weight.ndim > 1 and weight not in looked_up]
    others = [weight for weight in trained if weight.ndim < 2 or weight in looked_up]
    groups = [dict(params=decayed), dict(params=others, weight_decay=0.0)]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=args.lr,
        betas=(0.9, 0.95),
        weight_decay=args.weight_decay,
        fused=True,
    )


def lr_multiplier(step, plan, args):
    """The learning-rate multiplier at `step`; the warm-up takes at most a tenth of all steps."""
    warmup = min(args.warmup_steps, plan.total_steps // 10)
    return schedule.multiplier(args.lr_schedule, step, plan.total_steps, warmup)


def build_scheduler(optimizer, plan, args):
    """Multiplies each learning rate by `lr_multiplier` after each step."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_multiplier(step, plan, args)
    )


def load_data(accelerator, tokenizer, packed, args):  # EDIT: data
    """Loads the blocks of tokens to train on, and those held out; of a stream only these.

    Args: packed (bool): whether several documents share a block.

    Returns:
        Corpus.
    """
    data = load_source(accelerator, tokenizer, packed, args)
    agree(accelerator, args.dataset, data)
    if args.patience and data.held_out == "test":
        raise UserError("--patience needs a validation split: give --val_fraction 0.05, say")
    if args.dry_run:
        data.splits[data.held_out] = data.splits[data.held_out].first(20)
    return data


def load_source(accelerator, tokenizer, packed, args):
    """As `load_data`, without a word about it; one process of each machine tokenizes."""
    settings = TokenSettings.from_args(tokenizer, packed, args)
    if args.streaming:
        return run_on_main(accelerator, lambda: load_held_out(args.dataset, settings))
    return local_main_first(accelerator, lambda: load_tokens(args.dataset, settings))


def fit_batch(accelerator, data, args):
    """Divides the global batch, of a size that fits the data; says if the run is very short.

    Returns:
        the arguments, with that batch size. With --overfit_batch, the data become those of a batch.
    """
    blocks = len(data.splits["train"]) if "train" in data.splits else None
    args = fit_batch_size(args, blocks, 0.5, f"blocks of {args.block_size} tokens")
    elastic.divide_batch(accelerator, args.batch_size, args.gradient_accumulation_steps)
    if args.overfit_batch:
        batch = data.splits["train"].first(args.batch_size)
        data.splits.update(dict.fromkeys(data.splits, batch))
    elif blocks and not args.max_train_steps and accelerator.is_main_process:
        steps = blocks // args.batch_size * args.epochs
        if steps < SHORT:
            notice(
                f"{plural(steps, 'step')} in all teach little: give more --epochs, or a smaller "
                f"--block_size than {args.block_size}, which makes more blocks"
            )
    return args


def open_documents(accelerator, tokenizer, config, progress, args):
    """Opens the stream of documents where the checkpoint was that has this progress (dict)."""
    position = progress.get("position")
    share = Share.from_args(args, accelerator, count_lanes(args.batch_size), position)
    settings = TokenSettings.from_args(tokenizer, causal_lm.can_pack(config), args)
    return local_main_first(accelerator, lambda: open_stream(args.dataset, settings, share))


def build_train_loader(accelerator, train_set, args):
    """Builds a loader of global batches, which `prepare` divides; a stream has its share only."""
    options = loader_options(accelerator)
    if isinstance(train_set, LaneStream):
        return DataLoader(train_set, batch_size=None, **options)
    order = EpochSampler(len(train_set), args.batch_size, args.seed)
    batch_size = args.batch_size // args.gradient_accumulation_steps
    return accelerator.prepare(
        DataLoader(train_set, batch_size, sampler=order, drop_last=True, **options)
    )


def build_eval_loader(accelerator, held_out, args, count=None):
    """Builds a loader of `count` held-out blocks (None: all)."""
    chosen = evaluation.choose(held_out, count or len(held_out), args.seed)
    batch_size = evaluation_batch_size(accelerator, len(chosen), max(1, 8192 // args.block_size))
    return accelerator.prepare(DataLoader(chosen, batch_size, **loader_options(accelerator)))


def epoch_batches(loader, epoch):
    """The loader of `epoch`; a stream has no epochs: it continues at its own position."""
    if not isinstance(loader.dataset, LaneStream):
        loader.set_epoch(epoch)
    return loader


# ----------------------------------------------------------------------- loss, metric and samples


def compute_loss(model, batch, per_block=False):  # EDIT: loss
    """The sum of the losses of a batch's targets, in nats; or `per_block`, of each block's."""
    return model(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        targets=batch["targets"],
        per_block=per_block,
    )


def count_targets(accelerator, batches):
    """Counts the targets of a step: its loss is the mean over those of the whole global batch.

    Documents differ in length, so micro-batches and processes do not have equal weight.

    Returns:
        tuple: the batches, on the device; the number of targets in those of all processes.
    """
    batches = send_to_device(list(batches), accelerator.device, non_blocking=True)
    count = sum((batch["targets"] >= 0).sum() for batch in batches)
    return batches, accelerator.reduce(count, "sum").clamp(min=1)


@torch.no_grad()
def evaluate(accelerator, model, loader, watch):  # EDIT: metric
    """Computes exact metrics: each held-out target counts once, on any number of processes.

    Returns:
        dict: `loss` in nats per target token, with its standard error; `perplexity`; for text
        `bits_per_byte`, which can be compared between tokenizers; and the number of `tokens`.
    """
    model.eval()
    blocks, rank = loader.dataset, accelerator.process_index
    size = loader.total_batch_size // accelerator.num_processes
    sums = 0
    for index, batch in enumerate(watch(loader)):
        # The last batch is filled up with repeated blocks, which do not count: they are not where
        # their ids say.
        place = torch.arange(len(batch["ids"]), device=batch["ids"].device)
        place += (index * accelerator.num_processes + rank) * size
        batch["targets"][batch["ids"] != place] = -100
        losses = compute_loss(model, batch, per_block=True)
        sums = sums + evaluation.moments(losses, (batch["targets"] >= 0).sum(1))
    model.train()
    loss, error, count = evaluation.mean_and_error(accelerator.reduce(sums, "sum"))
    if count != blocks.target_tokens:
        raise RuntimeError(f"evaluated {count} of {blocks.target_tokens} held-out targets")
    metrics = evaluation.with_error("loss", loss, error)
    metrics["perplexity"] = math.exp(min(loss, 700))
    if blocks.bytes:
        metrics["bits_per_byte"] = loss * count / blocks.bytes / math.log(2)
    return {**metrics, "tokens": count}


@torch.compiler.set_stance("force_eager")  # because each text length would be compiled separately
@torch.no_grad()
def generate(model, tokenizer, prompts, length):
    """Continues each prompt (a list of token ids) greedily by at most `length` tokens, as text.

    Under FSDP every process must call this function, because a forward pass needs all shards.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    # A model with a fixed number of positions reads the end of a longer prompt.
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    length = int(min(length, most // 2))
    prompts = [prompt[-int(min(len(prompt), most - length)) :] for prompt in prompts]
    options = causal_lm.ends(model, tokenizer) | dict(max_new_tokens=length, do_sample=False)
    texts = []
    for first in range(0, len(prompts), 25):
        batch = [torch.tensor(prompt, device=device) for prompt in prompts[first : first + 25]]
        pad = partial(pad_sequence, batch_first=True, padding_side="left")
        inputs = pad(batch, padding_value=options["pad_token_id"])
        mask = pad([torch.ones_like(prompt) for prompt in batch])
        with fsdp.gathered(model):
            output = model.generate(inputs, attention_mask=mask, **options)
        new = output[:, inputs.size(1) :]
        texts += tokenizer.batch_decode(new, skip_special_tokens=True)
    model.train(was_training)
    return texts


def example_prompt(tokenizer, data, prompts):
    """A line to try --generate with: the beginning of a held-out text or prompt."""
    if data.kind == "messages" or not prompts:
        return "Hello"
    text = tokenizer.decode(prompts[0][0], skip_special_tokens=True).strip()
    return text.partition("\n")[0][:60] or "Hello"


def show_samples(model, tokenizer, prompts):
    """Prompts with the model's answers, and with those of the data, as text."""
    parts = []
    answers = generate(model, tokenizer, [tokens for tokens, _ in prompts], SAMPLE_TOKENS)
    for (tokens, expected), answer in zip(prompts, answers, strict=True):
        parts += [f"> {tokenizer.decode(tokens, skip_special_tokens=True)}", answer]
        if expected is not None:
            text = tokenizer.decode(expected, skip_special_tokens=True)
            parts.append(f"(in the data: {text.strip()})")
    return "\n".join(parts) + "\n"


def generates_alone(accelerator):
    """Whether this process generates text while the others wait; not of a sharded model."""
    return accelerator.is_main_process and not accelerator.is_fsdp2


def log_samples(accelerator, run, step, model, tokenizer, prompts):
    """Logs answers of the model during training; those of a sharded one come at the end only."""
    if not accelerator.is_fsdp2:
        alone = generates_alone(accelerator)
        text = show_samples(model, tokenizer, prompts) if alone else None
        run.log("sample", step, text=text)


def share_of_exact(accelerator, model, tokenizer, held_out, args):
    """The share of prompts to which the model answers exactly what the data does, as a metric.

    A dict: {} unless it is `--dataset synthetic` (other data have no such answers), on the process
    that generates.
    """
    is_asked = args.dataset == "synthetic" and args.loss_on == "answers" and not args.dry_run
    if not is_asked or not generates_alone(accelerator):
        return {}
    prompts, expected = map(list, zip(*held_out.prompts(ANSWERS), strict=True))
    answers = generate(model, tokenizer, prompts, SAMPLE_TOKENS)
    expected = tokenizer.batch_decode(expected, skip_special_tokens=True)
    both = zip(answers, expected, strict=True)
    exact = sum(answer.strip() == text.strip() for answer, text in both)
    return {"exact_answers": exact / len(prompts)}


def load_trained(folder, args):
    """The model, as `compute_loss` takes it, and the tokenizer of a finished run of `args`."""
    options = dict(dtype="auto" if args.lora_rank else torch.float32)
    if args.attention != "auto":
        options["attn_implementation"] = args.attention
    model, tokenizer, _ = adapters.load_trained(folder, **options)
    lm_loss.chunk_loss(model)
    return model, tokenizer


def use_trained(args):
    """For --merge; for --generate: prints the continuation of --prompt, or the answer to it."""
    if args.merge:
        return print(adapters.merge(args.merge))
    model, tokenizer, kind = adapters.load_trained(args.generate)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    prompt = Encoder(tokenizer).encode_prompt(args.prompt, kind)
    if not prompt:
        raise UserError("--prompt is empty, and this model has no token that begins a text")
    print(generate(model, tokenizer, [prompt], ANSWER_TOKENS)[0])


# --------------------------------------------------------------------------------------------- main

MAY_CHANGE = flags.MAY_CHANGE | {
    "activation_checkpointing",
    "attention",
    "export_dtype",
    "generate",
    "prompt",
    "merge",
}
# How a model is used: its loading, and what it is asked.
USAGE = """```python
from {library} import {loader}
from transformers import AutoTokenizer

model = {loader}.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
{inputs}
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))
```"""
CHAT = """messages = [{"role": "user", "content": "Hello"}]
options = dict(add_generation_prompt=True, return_dict=True, return_tensors="pt")
inputs = tokenizer.apply_chat_template(messages, **options)"""
TEXT = 'inputs = tokenizer("Hello", return_tensors="pt")'


def write_outputs(accelerator, run, model, tokenizer, prompts, args):
    """Writes the samples, the curves and the model card of a finished run."""
    with plots.optional("sample.txt"):
        if accelerator.is_main_process or accelerator.is_fsdp2:
            text = show_samples(model, tokenizer, prompts)
        if accelerator.is_main_process:
            write_text(run.path / "sample.txt", text)
            print(text)
    if accelerator.is_main_process:
        plots.curves(run.path, {"loss": "loss (nats per token)", "perplexity": "perplexity"})
        kind = run.record["data"]["kind"]
        model_card.write(run, **describe_model(args, run.path, kind))


def connect(args):
    """Sets up this process; returns the `Accelerator`, and its trackers."""
    on_cpu = launch.set_up(args, shards=True)  # network, threads, deterministic algorithms
    fsdp.set_up(on_cpu)
    trackers = Trackers(args)
    accelerator = Accelerator(cpu=on_cpu, **launch.accelerator_options(args), **trackers.options())
    launch.print_banner(accelerator)
    fsdp.configure(accelerator)
    return accelerator, trackers


def main():
    args = parse_args()
    if args.generate or args.merge:
        return use_trained(args)
    accelerator, trackers = connect(args)
    accumulation, processes = args.gradient_accumulation_steps, accelerator.num_processes
    tokenizer, config, base = local_main_first(accelerator, lambda: load_settings(args))
    data = load_data(accelerator, tokenizer, causal_lm.can_pack(config), args)
    args = fit_batch(accelerator, data, args)
    train_set, held_out = data.splits.get("train"), data.splits[data.held_out]
    prompts = held_out.prompts(3)
    plan = Plan.from_args(args, None if args.streaming else len(train_set))
    writer = None if args.wait_for_checkpoints else BackgroundWriter(accelerator)
    run = RunFolder(args, accelerator, MAY_CHANGE, [trackers], writer)
    run.open(plan, data=data.description, base=base, kind=data.kind)  # finished, or continues
    if run.finished:
        return
    eval_samples = evaluation.count_evaluated(run, plan, args, len(held_out))
    if args.streaming:
        train_set = open_documents(accelerator, tokenizer, config, run.progress, args)

    set_seed(args.seed)
    model = run_on_all(accelerator, lambda: build_model(accelerator, config, args))
    parameters, trained = count_parameters(model)
    rates = rates_per_block(accelerator, model, args)
    optimizer = build_optimizer(model, args)
    scheduler = build_scheduler(optimizer, plan, args)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    train_loader = build_train_loader(accelerator, train_set, args)
    eval_loader = build_eval_loader(accelerator, held_out, args, eval_samples)
    ddp.warm_up(model, lambda: compute_loss(model, lm_loss.small_batch(accelerator, model)))
    lm_loss.check(accelerator, model, causal_lm.can_pack(config))
    unwrapped = adapters.save_trained_only(accelerator.unwrap_model(model))  # LoRA's alone
    step = run.start(rates)  # accelerator.load_state, if there is a checkpoint
    schedule.recompute(scheduler)  # the run may have another length now
    run.print(f"{parameters:,} parameters, {trained:,} of them trained")
    guard = Guard(accelerator, args.timeout)
    watchdog = Watchdog(run, guard, accelerator, model, args.timeout)
    progress = evaluation.Progress(accelerator, guard.watch)

    def validate(step):
        metrics = evaluate(accelerator, model, eval_loader, progress)
        metrics |= share_of_exact(accelerator, unwrapped, tokenizer, held_out, args)
        score = -metrics["loss"] if data.held_out == "val" else None  # a test split: none
        log_samples(accelerator, run, step, unwrapped, tokenizer, prompts)
        run.log(data.held_out, step, score=score, **metrics)  # last: completes the evaluation

    if run.evaluation_due or step == 0:  # also before training, to see what it changes
        validate(step)
    train_loss, saved = math.inf, dict(eval_samples=eval_samples)
    profile = start_profiler(accelerator, run.path, args.profile)
    for epoch, remaining in plan.epochs(start=step, done=run.best.out_of_patience):
        batches = remaining.rest(epoch_batches(train_loader, epoch))  # not those before a restart
        for step, micro_batches in remaining.accumulated(run.timed(batches)):
            # `backward` divides by the accumulation, and DDP averages: both are undone here.
            micro_batches, targets = count_targets(accelerator, micro_batches)
            losses, ids, norm = [], [], None
            for batch in micro_batches:
                seed_step(accelerator, args.seed, step, len(losses))  # of dropout
                with accelerator.accumulate(model):
                    loss = compute_loss(model, batch) / targets
                    accelerator.backward(loss * accumulation * processes)
                    if accelerator.sync_gradients and args.max_grad_norm:
                        norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())
                ids.append(batch["ids"])
            profile.step()
            stop = guard.should_stop(step, losses, ids, norm)  # the same on every process
            if plan.log_due(step):
                train_loss = accelerator.reduce(torch.stack(losses).sum(), "sum").item()
                figures = dict(loss=train_loss, grad_norm=norm, lr=scheduler.get_last_lr()[0])
                run.log("train", step, **figures, **watchdog.figures())
            if stop or run.save_due(step):
                saved["position"] = gather_position(batch)
                with run.checkpoint(step, guard, model, **saved) as folder:
                    accelerator.save_state(folder)
            if stop:
                run.exit_preempted(step)
            if plan.evaluation_due(step):
                validate(step)  # a signal ends it at once: the restart evaluates
        if args.overfit_batch and train_loss < 0.01:
            break
    profile.stop()

    adapters.export(accelerator, run.path, model, tokenizer)  # what is evaluated next
    last = evaluation.count_last(plan, args, len(held_out))
    counts = progress.announce(last, len(held_out), run.path)
    eval_loader = build_eval_loader(accelerator, held_out, args, last)
    metrics = evaluate(accelerator, model, eval_loader, progress)
    metrics |= share_of_exact(accelerator, unwrapped, tokenizer, held_out, args)
    results = {f"{data.held_out}_{name}": value for name, value in metrics.items()}
    run.finish(step, **results, **counts, parameters=parameters, trained_parameters=trained)
    write_outputs(accelerator, run, unwrapped, tokenizer, prompts, args)
    example = example_prompt(tokenizer, data, prompts)
    run.close(model_card.command(Path(__file__).name, "--generate", run.path, "--prompt", example))
    accelerator.end_training()


def is_on_hub(name):
    """Whether a model or data set is neither on this machine nor made by a script."""
    return name not in ("tiny", "synthetic") and not Path(name).expanduser().exists()


def describe_model(args, folder, kind):
    """What the model card says about a model of documents of a `kind`, for `model_card.write`."""
    part = "adapter" if (folder / "adapter").is_dir() else "model"
    library, loader = "transformers", "AutoModelForCausalLM"
    if part == "adapter":
        library, loader = "peft", "AutoPeftModelForCausalLM"
    inputs = CHAT if kind == "messages" else TEXT
    settings = read_json(folder / part / "config.json") or {}
    dtype = f", in {settings['dtype']}, which the scores are of" if "dtype" in settings else ""
    metadata = {}
    if is_on_hub(args.model) and not args.from_scratch:
        metadata["base_model"] = args.model
    if is_on_hub(args.dataset):
        metadata["datasets"] = [args.dataset]
    return {
        "title": "A causal language model",
        "library": library,
        "task": "text-generation",
        "metadata": metadata,
        "weights": f"The folder `{part}` has the weights{dtype}, and the tokenizer.",
        "usage": USAGE.format(library=library, loader=loader, folder=part, inputs=inputs),
    }


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    group = parser.add_argument_group("data")
    group.add_argument(
        "--dataset",
        default="synthetic",
        help="Hub id, local file or folder, or `synthetic`: dates in words, to be written in ISO "
        "8601",
    )
    group.add_argument("--subset", help="configuration of a data set of the Hub")
    group.add_argument(
        "--streaming",
        action="store_true",
        help="read and tokenize during training; needs --max_train_steps",
    )
    group.add_argument(
        "--val_fraction",
        type=number(float, 0, below=1, above=True),
        help="share to hold out if there is neither a val nor a test split (default: 0.1)",
    )
    group.add_argument(
        "--block_size",
        type=number(int, 2, most=2**20),
        default=1024,
        help="tokens per block, in which documents are packed",
    )
    group.add_argument(
        "--chat_template", metavar="FILE", help="Jinja template, instead of that of the tokenizer"
    )
    group.add_argument(
        "--loss_on",
        choices=["answers", "all"],
        default="answers",
        help="train on the answers of the assistant (or the completion) only, or on all tokens",
    )
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default="tiny",
        help="Hub id or folder of a causal language model, or `tiny`: a small, new one of bytes",
    )
    group.add_argument(
        "--from_scratch",
        action="store_true",
        help="start with random weights: take only configuration and tokenizer from --model",
    )
    group.add_argument(
        "--export_dtype",
        choices=["auto", "float32", "bfloat16"],
        default="auto",
        help="dtype of the exported weights, which the last evaluation uses; auto: that of the "
        "files of --model, float32 for new weights. Adapters, and what --merge writes, are float32",
    )
    group.add_argument(
        "--attention",
        choices=["auto", "sdpa", "eager"],
        default="auto",
        help="implementation in transformers; auto: sdpa, without a mask if possible",
    )
    group.add_argument(
        "--activation_checkpointing",
        action="store_true",
        help="less memory, a third more computation",
    )
    group = parser.add_argument_group("LoRA (adapters beside frozen weights, arXiv:2106.09685)")
    group.add_argument(
        "--lora_rank",
        type=number(int, 0, most=2**14),  # the width of the largest models
        default=0,
        help="rank of the adapters; 0: train all weights",
    )
    group.add_argument(
        "--lora_alpha",
        type=number(float, 0, above=True, most=2**15),
        help="scale of the adapters, as a multiple of 1 / rank; default: twice the rank",
    )
    group.add_argument(
        "--lora_targets",
        default="all-linear",
        metavar="NAMES",
        help="layers with adapters, separated by commas, such as q_proj,v_proj",
    )
    group = parser.add_argument_group(
        "training (a sample is a block of block_size tokens; --lr is 2e-4 with LoRA)"
    )
    parser.add_training_arguments(group)
    flags.add(group, *flags.OPTIMIZER, "lr_schedule", "compile", lr_schedule="cosine")
    group.add_argument(
        "--warmup_steps",
        type=number(int, 0),
        default=50,
        help="steps of warm-up, at most a tenth of the run",
    )
    # --model takes the place of --init_from; tokens in memory-mapped files need no workers.
    group = parser.add_run_arguments()
    flags.add(group, "patience", "eval_samples", *flags.EXTRAS)
    group = parser.add_argument_group("samples")
    group.add_argument(
        "--generate",
        metavar="PATH",
        help="do not train: answer --prompt with the model of a run, or any other model",
    )
    group.add_argument("--prompt", type=str, default="Hello", help="for --generate")
    group.add_argument(
        "--merge",
        metavar="PATH",
        help="do not train: write model/ to the folder of a run with LoRA, its adapter merged",
    )
    parser.set_defaults(epochs=1, batch_size=16, max_grad_norm=1.0, weight_decay=0.1)
    has_lora = flags.choice(parser, "lora_rank") not in (0, "0")
    parser.set_defaults(lr=2e-4 if has_lora else 2e-5)
    if flags.choice(parser, "model") == "tiny":
        parser.set_defaults(block_size=256, lr=4e-3, epochs=2)
    args = flags.parse_with_checks(parser)
    check_packages()
    args.lora_alpha = args.lora_alpha or 2.0 * args.lora_rank
    if args.lora_rank and (args.from_scratch or args.model == "tiny"):
        raise UserError("LoRA adapts pretrained weights: give a --model that has some")
    if args.streaming and args.val_fraction:
        raise UserError("--streaming holds out one document of 64: leave out --val_fraction")
    args.val_fraction = args.val_fraction or 0.1
    if args.streaming and (args.overfit_batch or not args.max_train_steps):
        raise UserError(
            "--streaming needs --max_train_steps, and cannot be combined with --overfit_batch"
        )
    if args.overfit_batch:
        args.lr_schedule = "constant"
    return frozen(args)


if __name__ == "__main__":
    entry.run(main, explain)
