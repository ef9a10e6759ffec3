"""Only the completion's turn is trained where prompt and completion are messages."""

from finetune.config import ModelSection
from finetune.data.chat import encode
from finetune.data.encoded import IGNORE
from finetune.data.examples import Chat
from finetune.model.source.tokenizer import load_tokenizer


def test_turns_of_the_prompt_are_not_trained() -> None:
    tokenizer = load_tokenizer(ModelSection())
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "first answer"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "second answer"},
    ]
    encoded = encode(Chat(messages, frozenset({0, 1, 2})), tokenizer)
    trained = [token for token, label in zip(encoded.input_ids, encoded.labels, strict=True) if label != IGNORE]
    assert tokenizer.decode(trained) == "second answer<|im_end|>"
