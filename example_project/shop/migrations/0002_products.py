from decimal import Decimal

from django.db import migrations

PRODUCTS = (
    ("Beeswax candle", "Burns for thirty hours and smells of summer.", Decimal("9.50"), 1_000_000),
    ("Enamel mug", "Survives camping trips and dishwashers.", Decimal("14.00"), 1_000_000),
    ("Linen tea towel", "Softer with every wash.", Decimal("12.90"), 1_000_000),
    ("Grandmother's clock", "There is only one, and it has always been slow.", Decimal("480.00"), 1),
)


def stock_the_shelves(apps, schema_editor):
    product = apps.get_model("shop", "Product")
    product.objects.using(schema_editor.connection.alias).bulk_create(
        product(name=name, description=description, price=price, stock=stock)
        for name, description, price, stock in PRODUCTS
    )


def clear_the_shelves(apps, schema_editor):
    for model in ("Order", "Product"):
        apps.get_model("shop", model).objects.using(schema_editor.connection.alias).all().delete()


class Migration(migrations.Migration):
    dependencies = (("shop", "0001_initial"),)

    operations = (migrations.RunPython(stock_the_shelves, clear_the_shelves),)
