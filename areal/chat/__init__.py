"""Messages and tokens: prompts, supervised samples and parsed answers by a tokenizer's own chat template."""

from areal.chat.answer import ParsedAnswer, ToolCall
from areal.chat.chat import Chat
from areal.chat.conversation import Conversation
from areal.chat.pictures import Pictures

__all__ = ["Chat", "Conversation", "ParsedAnswer", "Pictures", "ToolCall"]
