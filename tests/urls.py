from django.contrib import admin
from django.urls import path

from django_pgjobs import metrics

urlpatterns = [path("admin/", admin.site.urls), path("metrics/jobs", metrics.view)]
