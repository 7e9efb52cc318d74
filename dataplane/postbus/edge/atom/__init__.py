"""Administration: definitions in the XML of ServiceBusAdministrationClient."""
