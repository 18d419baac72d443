from django.urls import path

from . import views

app_name = "shop"
urlpatterns = [
    path("", views.index, name="index"),
    path("places/", views.places, name="places"),
    path("places/import/", views.start_import, name="start_import"),
]
