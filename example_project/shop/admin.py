from django.contrib import admin

from .models import Order, Place, Product


@admin.register(Product)
class ProductAdmin(admin.ModelAdmin):
    list_display = ("name", "price", "stock")


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):
    list_display = ("id", "product", "quantity", "email", "placed_at", "receipt_sent_at")
    list_select_related = ("product",)


@admin.register(Place)
class PlaceAdmin(admin.ModelAdmin):
    list_display = ("zone", "countries", "next_clock_change")
    search_fields = ("zone", "comments")
