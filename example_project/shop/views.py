from django.contrib import messages
from django.db import IntegrityError, transaction
from django.db.models import F
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST

from .forms import OrderForm
from .jobs import import_places, send_receipt
from .models import Order, Place, Product


def index(request: HttpRequest) -> HttpResponse:
    form = OrderForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            order = place_order(form)
        except IntegrityError:
            form.add_error("quantity", "There are not that many left.")
        else:
            messages.success(request, f"Thank you! This is order {order.pk}; the receipt is on its way.")
            return redirect("shop:index")
    return render(
        request,
        "shop/index.html",
        {
            "form": form,
            "products": Product.objects.all(),
            "orders": Order.objects.select_related("product")[:10],
        },
        status=422 if form.errors else 200,
    )


def place_order(form: OrderForm) -> Order:
    """Store the order and enqueue its receipt: both happen, or neither does."""
    with transaction.atomic():
        order = form.save(commit=False)
        order.total = order.product.price * order.quantity
        order.save()
        send_receipt.enqueue(order.pk)
        # The database refuses a stock below zero; order and job then vanish together.
        Product.objects.filter(pk=order.product_id).update(stock=F("stock") - order.quantity)
    return order


def places(request: HttpRequest) -> HttpResponse:
    return render(request, "shop/places.html", {"places": Place.objects.all()})


@require_POST
def start_import(request: HttpRequest) -> HttpResponse:
    job = import_places.enqueue()
    messages.success(request, f"Job {job.id} is {job.status}. Reload this page to see the places arrive.")
    return redirect("shop:places")
