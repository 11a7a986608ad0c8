// Shows the API's description with Swagger UI. Nothing is asked of any other host, and the key is kept nowhere.
window.ui = SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#api",
  deepLinking: true,
  defaultModelsExpandDepth: 0,
  displayRequestDuration: true,
  persistAuthorization: false,
  // Else the description would go to a validator on another host.
  validatorUrl: null,
});
