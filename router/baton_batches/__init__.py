"""Files and batches of the OpenAI API: work that outlives a request and a process."""
