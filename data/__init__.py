"""From source files to tokenised shards: cleaning, tokenizers, and the format that training reads."""
