from django.db import models


class Account(models.Model):
    """What the jobs that use the ORM read and write. Its table is made without a migration."""

    balance = models.IntegerField()

    def __str__(self) -> str:
        return f"{self.pk}: {self.balance}"
