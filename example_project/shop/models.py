"""What the shop sells, what was ordered, and the places it knows the time of."""

from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import F, Q


class Product(models.Model):
    name = models.CharField(max_length=100, unique=True)
    description = models.CharField(max_length=200)
    price = models.DecimalField(max_digits=8, decimal_places=2)
    stock = models.IntegerField()

    class Meta:
        ordering = ("name",)
        constraints = (models.CheckConstraint(condition=Q(stock__gte=0), name="stock_is_not_negative"),)

    def __str__(self) -> str:
        return self.name


class Order(models.Model):
    product = models.ForeignKey(Product, on_delete=models.PROTECT, related_name="orders")
    quantity = models.PositiveIntegerField(default=1, validators=[MinValueValidator(1)])
    email = models.EmailField()
    total = models.DecimalField(max_digits=12, decimal_places=2)
    placed_at = models.DateTimeField(auto_now_add=True)
    receipt_sent_at = models.DateTimeField(null=True, editable=False)

    class Meta:
        ordering = ("-id",)

    def __str__(self) -> str:
        return f"order {self.pk}"


class Place(models.Model):
    """A row of the public-domain time zone table, and when its clocks change next."""

    zone = models.CharField(max_length=64, unique=True)
    countries = models.CharField(max_length=100)
    coordinates = models.CharField(max_length=20)
    comments = models.CharField(max_length=200, blank=True)
    next_clock_change = models.DateTimeField(null=True)
    imported_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ("zone",)

    def __str__(self) -> str:
        return self.zone


class Tally(models.Model):
    """How often something happened: lets a job function know that it has been here before."""

    key = models.CharField(max_length=100, unique=True)
    count = models.PositiveIntegerField(default=0)

    class Meta:
        verbose_name_plural = "tallies"

    def __str__(self) -> str:
        return f"{self.key}: {self.count}"

    @classmethod
    def bump(cls, key: str) -> int:
        """Count one more, committed at once, and return the new count."""
        cls.objects.get_or_create(key=key)
        cls.objects.filter(key=key).update(count=F("count") + 1)
        return cls.objects.get(key=key).count
