"""Train a tiny BERT by the Trainer of transformers over the backend `hpcdist`; ranks must end with equal weights.

RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are those that accelerate reads; `make frameworks` sets them.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.training_args import ParallelMode

import hpcdist.torch_backend

dist.init_process_group("hpcdist", init_method="hpcdist://")
torch.manual_seed(1)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
model = BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=16, **sizes))
rows = [{"input_ids": torch.randint(50, (8,)), "labels": torch.tensor(number % 2)} for number in range(64)]
before = parameters_to_vector(model.parameters()).detach()
given = TrainingArguments(
    output_dir=sys.argv[1],
    per_device_train_batch_size=8,
    num_train_epochs=2,
    report_to=[],
    use_cpu=True,
    save_strategy="no",
    disable_tqdm=True,
)
result = Trainer(model=model, args=given, train_dataset=rows).train()
assert dist.get_backend() == "hpcdist"
assert given.parallel_mode is ParallelMode.DISTRIBUTED
assert result.global_step == 2 * 64 // 8 // dist.get_world_size(), "each rank has its part of the rows"
weights = parameters_to_vector(model.parameters()).detach()
assert not torch.equal(weights, before)
weights_by_rank = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
dist.all_gather(weights_by_rank, weights)
assert all(torch.equal(peer_weights, weights) for peer_weights in weights_by_rank)
print(f"rank {dist.get_rank()}: trained by transformers over hpcdist {hpcdist.__version__}", flush=True)
