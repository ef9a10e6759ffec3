"""The held-out loss: that of the model as it will be used, and a mean over tokens."""

import pytest
import torch
from steps import ready

from finetune.training.trainer import Trainer


@pytest.fixture
def trainer(quick) -> Trainer:
    return ready(quick("data.eval_share=0.5", "adapter.dropout=0.5", "quantization.kind=none"))


def test_an_evaluation_drops_nothing_and_leaves_the_model_as_it_was(trainer: Trainer) -> None:
    batches = list(trainer.get_eval_dataloader())
    for training in (True, False):
        trainer.model.train(training)
        first, second = trainer.held_out_sums(batches), trainer.held_out_sums(batches)
        assert torch.equal(first, second)
        assert trainer.model.training is training
        assert all(module.training is training for module in trainer.model.modules())


def test_the_held_out_loss_is_the_mean_over_the_trained_tokens_of_all_rows(trainer: Trainer) -> None:
    dataloader = trainer.get_eval_dataloader()
    loss, tokens = trainer.held_out_sums(dataloader).tolist()
    labels = [label for row in trainer.eval_dataset for label in row["labels"][1:]]
    assert tokens == sum(label != -100 for label in labels)
    found = trainer.evaluation_loop(dataloader, "evaluation")
    assert found.metrics == {"eval_loss": pytest.approx(loss / tokens)}
    assert found.num_samples == len(trainer.eval_dataset)
