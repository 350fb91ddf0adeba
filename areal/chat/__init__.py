"""Messages and tokens: prompts, supervised samples and parsed answers by a tokenizer's own chat template."""

from areal.chat.answer import ParsedAnswer, ToolCall
from areal.chat.chat import Chat
from areal.chat.conversation import Conversation

__all__ = ["Chat", "Conversation", "ParsedAnswer", "ToolCall"]
