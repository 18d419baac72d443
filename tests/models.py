from __future__ import annotations

from django.db import models


class Effect(models.Model):
    """What a job function did, for tests to count."""

    what = models.CharField(max_length=50)
    pid = models.IntegerField(default=0)
    detail = models.TextField(default="")

    def __str__(self) -> str:
        return self.what
