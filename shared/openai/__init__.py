"""The OpenAI-style endpoints without HTTP: bodies to jobs, ended jobs to answers. Web side and batches use it."""
