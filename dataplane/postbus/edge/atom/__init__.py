"""The administration door: definitions as ServiceBusAdministrationClient speaks them, in XML."""
