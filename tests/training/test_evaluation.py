"""The held-out loss: that of the model as it will be used, and a mean over tokens."""

import pytest
import torch
from steps import ready

from finetune.training.evaluation import DoesNotFit, Evaluation
from finetune.training.loop import Loop


@pytest.fixture
def loop(quick) -> Loop:
    return ready(quick("data.eval_share=0.5", "adapter.dropout=0.5", "quantization.kind=none"))


def test_an_evaluation_drops_nothing_and_leaves_the_model_as_it_was(loop: Loop) -> None:
    model = loop.step.model
    for training in (True, False):
        model.train(training)
        first, second = loop.evaluation.sums(), loop.evaluation.sums()
        assert torch.equal(first, second)
        assert model.training is training
        assert all(module.training is training for module in model.modules())


def test_the_held_out_loss_is_the_mean_over_the_trained_tokens_of_all_rows(loop: Loop) -> None:
    loss, tokens = loop.evaluation.sums().tolist()
    labels = [label for row in loop.evaluation.rows for label in row["labels"][1:]]
    assert tokens == sum(label != -100 for label in labels)
    assert loop.evaluation.loss() == pytest.approx(loss / tokens)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_row_that_does_not_fit_costs_one_process_its_loss_and_several_the_run(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """That cannot catch up: the others wait for this one's sums."""
    inputs, skipped = {"input_ids": torch.zeros(1, 9)}, []

    def exhausted(self: Evaluation, steps: object) -> torch.Tensor:
        raise DoesNotFit(inputs, "no memory left")

    monkeypatch.setattr(Evaluation, "sums", exhausted)
    monkeypatch.setattr(loop.evaluation, "skip", skipped.append)
    monkeypatch.setattr(loop.step, "world_size", processes)
    if processes == 1:
        assert loop.evaluation.loss() is None
        assert skipped == [inputs]
    else:
        with pytest.raises(DoesNotFit):
            loop.evaluation.loss()
        assert not skipped
