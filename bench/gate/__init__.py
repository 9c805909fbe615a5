"""What the fine tier and the gate recover of what 2-bit experts lose, measured on TinyMoE."""
