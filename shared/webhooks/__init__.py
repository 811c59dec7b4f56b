"""Webhooks after the Standard Webhooks specification: told once a job or batch has ended, however often it takes."""
