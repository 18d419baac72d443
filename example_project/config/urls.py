from django.contrib import admin
from django.urls import include, path

from django_pgjobs import metrics

urlpatterns = [
    path("admin/", admin.site.urls),
    path("metrics/jobs", metrics.view),  # for Prometheus, and for staff who may view jobs
    path("", include("shop.urls")),
]
