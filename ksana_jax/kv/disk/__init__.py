"""The disk tier of KV blocks: file format, index of files, and the tier itself."""
