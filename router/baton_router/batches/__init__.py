"""Files and batches: the part of the OpenAI API whose work outlives a request and a process."""
