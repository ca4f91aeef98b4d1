"""From files of conversations to token streams: read, tokenize, plan the steps, pack, unpad."""
